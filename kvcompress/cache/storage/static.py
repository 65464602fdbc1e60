"""Entries in buffers of a fixed shape, where decoding is to run as one compiled graph."""

import torch
import torch.nn.functional as F

from ...errors import KVCompressError
from .base import Storage, lasting, roomy


class StaticStorage(Storage):
    """Buffers of a fixed shape (batch, kv_heads, capacity, head_dim) and a cursor on the device, so that every decode
    step is the same graph. Rows and heads that keep fewer are padded: static shapes cost their padding.

    Args:
        kept: right-aligned, with -1 in unused slots; None in place of its indices for column = slot.
        pads: as in `DenseStorage`.
        room: tokens that can be appended.
    """

    has_fixed_shapes = True

    def __init__(self, keys, values, indices, pads, room: int):
        self.entries, self.capacity = keys.shape[2], keys.shape[2] + room
        self.indices = None if indices is None else indices.to(torch.int32)
        self.keys, self.values = roomy(keys, self.capacity), roomy(values, self.capacity)
        # Attention multiplies by zero what no query may see: it must be finite.
        self.keys[:, :, self.entries :] = 0
        self.values[:, :, self.entries :] = 0
        unused = torch.zeros(keys.shape[0], 1, self.entries, dtype=torch.bool, device=keys.device)
        if indices is not None:
            unused = indices < 0
        elif pads is not None:
            unused = pads[:, None]
        room_used = torch.zeros(*unused.shape[:2], room, dtype=torch.bool, device=keys.device)
        self.usable = ~torch.cat([unused, room_used], dim=2)
        self.slots = torch.arange(self.capacity, device=keys.device)
        self.cursor = lasting(self.slots.new_full, (1,), self.entries)
        self._left = room  # the same on the host, as far as no compiled graph has written
        self._mark()

    def _mark(self) -> None:
        """The graph writes into these tensors: CUDA graphs are given up where it may not count on their place. Without
        a guard, other tensors (the next prompt's) are recorded anew and not compiled anew."""
        for tensor in (self.keys, self.values, self.cursor):
            torch._dynamo.mark_static_address(tensor, guard=False)

    @property
    def length(self) -> int:
        return self.capacity

    @property
    def is_whole(self) -> bool:
        return self.indices is None

    @property
    def appended(self) -> torch.Tensor:
        """LongTensor (1,)."""
        return self.cursor - self.entries

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not torch.compiler.is_compiling():
            if keys.shape[2] > self._left:
                raise KVCompressError(
                    f"the static cache is full: it has room for max_new_tokens={self.capacity - self.entries} tokens "
                    "behind a prompt"
                )
            self._left -= keys.shape[2]
        rows = self.cursor + self.slots[: keys.shape[2]]
        self.keys.index_copy_(2, rows, keys)
        self.values.index_copy_(2, rows, values)
        self.cursor.add_(keys.shape[2])

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    def visible(self) -> torch.Tensor:
        return self.usable & (self.slots < self.cursor)

    def columns(self, seen: int) -> torch.Tensor:
        shape = self.keys.shape[:2]
        end = int(self.cursor)
        columns = torch.full((*shape, self.capacity), -1, device=self.keys.device)
        columns[..., : self.entries] = self.slots[: self.entries] if self.indices is None else self.indices.long()
        columns[..., self.entries : end] = torch.arange(seen - (end - self.entries), seen, device=self.keys.device)
        return columns.masked_fill(~self.visible(), -1)

    def select(self, rows: torch.Tensor) -> None:
        for name in ("keys", "values", "usable"):
            setattr(self, name, getattr(self, name)[rows])
        self.indices = None if self.indices is None else self.indices[rows]
        self._mark()

    def fork(self) -> "StaticStorage":
        twin = super().fork()
        twin.cursor = lasting(self.cursor.clone)
        twin._mark()
        return twin

    def state(self) -> dict[str, object]:
        end = int(self.cursor)
        return {**super().state(), "keys": self.keys[:, :, :end], "values": self.values[:, :, :end]}

    @classmethod
    def of_state(cls, state: dict[str, object], device: torch.device) -> "StaticStorage":
        room = (0, 0, 0, state["capacity"] - int(state["cursor"]))
        made = super().of_state({**state, **{name: F.pad(state[name], room) for name in ("keys", "values")}}, device)
        made._mark()
        return made

    def tensors(self) -> list[torch.Tensor]:
        tensors = (self.keys, self.values, self.indices, self.usable, self.slots, self.cursor)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def room_nbytes(self) -> int:
        end = int(self.cursor)
        return self.keys[:, :, end:].nbytes + self.values[:, :, end:].nbytes
