"""Static storage: buffers of fixed shape, so that decoding can run as one compiled graph."""

import torch
import torch.nn.functional as F

from ...device import runs_triton
from ...kernels.static_decode import static_decode
from .base import Storage, full, lasting, roomy, rows_of


class StaticStorage(Storage):
    """Buffers of fixed shape (batch, kv_heads, capacity, head_dim), with the number of appended tokens on the device.

    Every decode step is then the same graph. Rows and heads that keep fewer entries are padded, which costs memory. On
    a CPU it also costs time, since a query attends to all slots under a mask. On CUDA it attends to the slots in use,
    in place.

    Args:
        kept: right-aligned, with -1 in unused slots; None in place of its indices for column = slot.
        pads: as in `DenseStorage`, all in front.
        room: number of tokens that can be appended.
    """

    has_fixed_shapes = True

    def __init__(self, keys, values, indices, pads, room: int):
        self.entries, self.capacity = keys.shape[2], keys.shape[2] + room
        self.indices = None if indices is None else indices.to(torch.int32)
        self.keys, self.values = roomy(keys, self.capacity), roomy(values, self.capacity)
        # Attention multiplies invisible values by zero, so they must be finite.
        self.keys[:, :, self.entries :] = 0
        self.values[:, :, self.entries :] = 0
        self.slots = torch.arange(self.capacity, device=keys.device)
        if indices is not None:
            self.unused = (indices < 0).sum(2)
        else:
            self.unused = self.slots.new_zeros(keys.shape[0], 1) if pads is None else pads.sum(1, keepdim=True)
        self.appended = lasting(self.slots.new_zeros, (1,))
        self._counts = True  # whether this storage counts appended tokens itself
        self._left = room  # room left, on the host; compiled graphs do not update it
        self.decodes_in_place = runs_triton(keys.device)
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None  # a token that has not been written yet
        self._lay_out()

    def _lay_out(self) -> None:
        """Compute the segments, one per row and KV head, and mark all tensors as static.

        CUDA graphs copy other tensors, and are skipped if those are written to. Without a guard, new tensors (the next
        prompt's) are recorded again but not compiled again."""
        shape = self.keys.shape[:2]
        unused = self.unused.expand(shape)
        segments = torch.arange(unused.numel(), device=unused.device).view(shape)
        self.starts, self.lengths = segments * self.capacity + unused, self.entries - unused
        for tensor in self.tensors():
            torch._dynamo.mark_static_address(tensor, guard=False)

    def count_with(self, other: "StaticStorage") -> None:
        """Let `other` count appended tokens for both; it belongs to a layer that is appended to first."""
        if other is not self:
            self.appended, self._counts = other.appended, False
            torch._dynamo.mark_static_address(self.appended, guard=False)

    @property
    def length(self) -> int:
        return self.capacity

    @property
    def filled(self) -> int:
        return self.entries + int(self.appended)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        new = keys.shape[2]
        if not torch.compiler.is_compiling():
            if new > self._left:
                raise full(self.capacity - self.entries)
            self._left -= new
        if self._counts:
            self.appended.add_(new)
        if self.decodes_in_place and new == 1:
            self._new = keys, values
        else:
            self._write(keys, values)

    def check_room(self, appended: int) -> None:
        if appended > self.capacity - self.entries:
            raise full(self.capacity - self.entries)

    def _write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the latest appended tokens to their slots."""
        new = keys.shape[2]
        rows = self.slots[:new] + (self.appended + (self.entries - new))
        self.keys.index_copy_(2, rows, keys)
        self.values.index_copy_(2, rows, values)

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """As `Storage.decode`; also writes a token that was just appended."""
        new, self._new = self._new or (None, None), None
        segments = self.keys, self.values, self.starts, self.lengths, self.appended, self.capacity
        return static_decode(query, *new, *segments, scaling)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._new is not None:
            self._write(*self._new)
            self._new = None
        return self.keys, self.values

    def visible(self) -> torch.Tensor:
        return (self.slots >= self.unused[..., None]) & (self.slots < self.entries + self.appended)

    def columns(self, seen: int) -> torch.Tensor:
        shape = self.keys.shape[:2]
        end = self.entries + int(self.appended)
        columns = torch.full((*shape, self.capacity), -1, device=self.keys.device)
        columns[..., : self.entries] = self.slots[: self.entries] if self.indices is None else self.indices.long()
        columns[..., self.entries : end] = torch.arange(seen - (end - self.entries), seen, device=self.keys.device)
        return columns.masked_fill(~self.visible(), -1)

    def select(self, rows: torch.Tensor) -> None:
        self.keys, self.values, self.unused = self.keys[rows], self.values[rows], self.unused[rows]
        self.indices = rows_of(self.indices, rows)
        self._lay_out()

    def fork(self) -> "StaticStorage":
        twin = super().fork()
        twin.appended, twin._counts = lasting(self.appended.clone), True
        torch._dynamo.mark_static_address(twin.appended, guard=False)
        return twin

    def state(self) -> dict[str, object]:
        keys, values = self.read()  # writes the latest token
        end = self.entries + int(self.appended)
        return {**super().state(), "keys": keys[:, :, :end], "values": values[:, :, :end]}

    @classmethod
    def of_state(cls, state: dict[str, object], device: torch.device) -> "StaticStorage":
        room = (0, 0, 0, state["capacity"] - state["keys"].shape[2])
        made = super().of_state({**state, **{name: F.pad(state[name], room) for name in ("keys", "values")}}, device)
        made.decodes_in_place = runs_triton(made.keys.device)
        made._lay_out()
        return made

    @property
    def room_nbytes(self) -> int:
        end = self.entries + int(self.appended)
        return self.keys[:, :, end:].nbytes + self.values[:, :, end:].nbytes
