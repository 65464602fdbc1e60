"""What every storage offers, and how buffers with spare room are made."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ...scoring.layer_view import Kept

LEAST_ROOM = 32


class Storage(ABC):
    """Entries of one layer. Seen from outside, all is aligned to the right: the newest entry of every row and KV
    head is in the last slot, and a row or head that keeps fewer begins with unused slots."""

    length: int  # slots, of the row and head that keeps most
    appended: int | torch.Tensor  # decoded tokens among them; with fixed shapes on the device
    is_whole: bool = False  # nothing was ever dropped (column = slot), and a prompt can be put behind it in one piece
    is_final: bool = False  # an entry is stored once and for all: another prompt goes behind it by `extend`
    has_fixed_shapes: bool = False  # a decode step is the same graph each time
    decodes_in_place: bool = False  # has `decode`, which attends to the entries where they lie
    fills_all_slots: bool = False  # the host knows that no slot is unused
    parts: tuple[type, ...] = ()  # dataclasses that `state` may hold

    @abstractmethod
    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write decoded states (batch, kv_heads, new, head_dim) behind the stored ones of every row and head."""

    @abstractmethod
    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (batch, kv_heads, length, head_dim)."""

    @abstractmethod
    def visible(self) -> torch.Tensor | None:
        """bool (batch, 1 or kv_heads, length), False at unused slots; None where there are none."""

    @abstractmethod
    def columns(self, seen: int) -> torch.Tensor:
        """The column that each slot holds: LongTensor (batch, kv_heads, length), -1 where unused. Appended tokens
        have the columns that end with `seen`."""

    @abstractmethod
    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order: LongTensor (rows,)."""

    def prefetch(self) -> None:  # noqa: B027, most storages have nothing to do
        """The entries will soon be read."""

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """All buffers, for counting bytes."""

    @property
    @abstractmethod
    def room_nbytes(self) -> int:
        """Bytes of the buffers that wait for tokens to come."""

    def extend(self, kept: Kept, first: int) -> None:
        """Put another compressed prompt, whose columns begin at `first`, behind what is stored (`is_final`)."""
        raise TypeError(f"a {type(self).__name__} is not extended but made anew")

    def forget(self, column: int, seen: int) -> None:
        """Drop what is stored of this column (`is_final`); other arguments as in `columns`."""
        raise TypeError(f"a {type(self).__name__} is not changed but made anew")

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of one token's queries (batch, heads, 1, head_dim), which stand behind all that is stored, without
        gathering (`decodes_in_place`); the result has the same shape."""
        raise TypeError(f"the entries of a {type(self).__name__} are read, not attended to where they lie")

    def held(self) -> list[list[int]] | None:
        """Slots in use, [row][head], where the host knows how heads differ."""
        return None

    def kept(self, seen: int) -> Kept:
        """Everything as one dense, right-aligned piece."""
        return Kept(*self.read(), self.columns(seen))

    def state(self) -> dict[str, object]:
        """What a file holds of it, by the names of its attributes: plain values, tensors, storages, and objects of the
        classes `parts`. Not the room for tokens to come, where anything may lie."""
        return dict(vars(self))

    @classmethod
    def of_state(cls, state: dict[str, object], device: torch.device) -> "Storage":
        """The storage that had this `state`, of a layer on `device`."""
        made = object.__new__(cls)
        vars(made).update(state)
        return made

    def fork(self) -> "Storage":
        """A storage that shares the present entries and may be appended to; undone by dropping it."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


def spare(length: int) -> int:
    """Room without a known answer length: an eighth more, so that a token costs a constant number of copies."""
    return max(LEAST_ROOM, length // 8)


def roomy(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of (batch, kv_heads, entries, head_dim) at the front of a buffer for `capacity` entries."""
    buffer = lasting(states.new_empty, (*states.shape[:2], capacity, states.shape[3]))
    buffer[:, :, : states.shape[2]] = states
    return buffer


def lasting(make: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
    """`make(*args)`, which can be written in place also outside of a `torch.inference_mode` in which it is made."""
    with torch.inference_mode(False), torch.no_grad():
        return make(*args)
