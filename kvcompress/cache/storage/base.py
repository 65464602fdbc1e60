"""`Storage`, the interface of all storages, and buffers with spare room."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from ...errors import KVCompressError
from ...scoring.layer_view import Kept

LEAST_ROOM = 32
_Made = TypeVar("_Made")


class Storage(ABC):
    """The entries of one layer.

    Seen from outside, slots are right-aligned: the last slot holds the newest entry of every row and KV head, and rows
    or heads with fewer entries begin with unused slots."""

    length: int  # slots of the row and head that keeps most
    appended: int | torch.Tensor  # decoded tokens among them; with fixed shapes on the device
    is_whole: bool = False  # nothing was ever dropped (column = slot), and a prompt can be appended in one piece
    is_final: bool = False  # entries are never stored again: another prompt is appended by `extend`
    has_fixed_shapes: bool = False  # a decode step is the same graph each time
    decodes_in_place: bool = False  # has `decode`, which attends to the entries in place
    fills_all_slots: bool = False  # the host knows that no slot is unused
    parts: tuple[type, ...] = ()  # dataclasses that `state` may hold

    @abstractmethod
    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append decoded states (batch, kv_heads, new, head_dim) to every row and head."""

    def check_room(self, appended: int) -> None:  # noqa: B027, most storages grow
        """Raise KVCompressError if the storage has no room for so many appended tokens."""

    @abstractmethod
    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (batch, kv_heads, length, head_dim)."""

    @abstractmethod
    def visible(self) -> torch.Tensor | None:
        """Return bool (batch, 1 or kv_heads, length), False at unused slots; None if there are none."""

    @abstractmethod
    def columns(self, seen: int) -> torch.Tensor:
        """Return the sequence column in each slot: LongTensor (batch, kv_heads, length), -1 if unused.

        The columns of appended tokens end with `seen`."""

    @abstractmethod
    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order: LongTensor (rows,)."""

    def prefetch(self) -> None:  # noqa: B027, most storages have nothing to do
        """Prepare for a `read` soon."""

    def tensors(self) -> list[torch.Tensor]:
        """Return all buffers, those of storages inside included, for counting bytes."""
        own = [part for part in vars(self).values() if isinstance(part, torch.Tensor)]
        inside = [part for part in vars(self).values() if isinstance(part, Storage)]
        return own + [tensor for storage in inside for tensor in storage.tensors()]

    @property
    def room_nbytes(self) -> int:
        """Bytes of the buffers that are reserved for new tokens."""
        return sum(part.room_nbytes for part in vars(self).values() if isinstance(part, Storage))

    def extend(self, kept: Kept, first: int) -> None:
        """Append another compressed prompt, whose columns start at `first` (if `is_final`)."""
        raise TypeError(f"a {type(self).__name__} is not extended but created again")

    def forget(self, column: int, seen: int) -> None:
        """Drop what is stored of this column (if `is_final`); `seen` as in `columns`."""
        raise TypeError(f"a {type(self).__name__} is not changed but created again")

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend to all entries with a new token's queries (batch, heads, 1, head_dim); the result has the same shape.

        It does not gather the entries (if `decodes_in_place`)."""
        raise TypeError(f"the entries of a {type(self).__name__} are read, not attended to in place")

    def held(self) -> list[list[int]] | None:
        """Return the slots in use, [row][head], if the host knows them."""
        return None

    @property
    def filled(self) -> int:
        """Number of slots up to that of the newest entry; those behind it are room."""
        return self.length

    def kept(self, seen: int) -> Kept:
        """Return everything as one dense, right-aligned piece."""
        return Kept(*self.read(), self.columns(seen))

    def state(self) -> dict[str, object]:
        """Return the attributes to save to a file: plain values, tensors, storages, and objects of the classes `parts`.

        The room for new tokens is not included, since its contents are arbitrary."""
        return dict(vars(self))

    @classmethod
    def of_state(cls, state: dict[str, object], device: torch.device) -> "Storage":
        """Create a storage from a saved `state`, for a layer on `device`."""
        made = object.__new__(cls)
        vars(made).update(state)
        return made

    def fork(self) -> "Storage":
        """Return a storage that shares the present entries and can be appended to without changing this one.

        Storages inside are forked, and lists are copied."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        for name, part in vars(self).items():
            if isinstance(part, list):
                setattr(twin, name, list(part))
            elif isinstance(part, Storage):
                setattr(twin, name, part.fork())
        return twin


def full(room: int) -> KVCompressError:
    """Return the error of a storage that has no room behind its `room` appended tokens."""
    return KVCompressError(f"the static cache is full: it has room for max_new_tokens={room} tokens after a prompt")


def spare(length: int) -> int:
    """Return the spare room for an answer of unknown length: an eighth, so that copies per token stay constant."""
    return max(LEAST_ROOM, length // 8)


def roomy(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """Copy (batch, kv_heads, entries, head_dim) to the front of a buffer for `capacity` entries."""
    buffer = lasting(states.new_empty, (*states.shape[:2], capacity, states.shape[3]))
    buffer[:, :, : states.shape[2]] = states
    return buffer


def put(buffers: Iterable[torch.Tensor], states: Iterable[torch.Tensor], rows: torch.Tensor) -> None:
    """Write states (batch, kv_heads, new, head_dim) into flat buffers (entries, head_dim), at LongTensor `rows`."""
    for buffer, part in zip(buffers, states, strict=True):
        buffer.index_copy_(0, rows, part.reshape(-1, part.shape[3]).to(buffer.dtype))


def columns_of(storage: Storage, keys: torch.Tensor, seen: int) -> torch.Tensor:
    """Return `Storage.columns` of a storage whose `indices` are columns without appended tokens, or None for column =
    slot. `keys` (batch, kv_heads, ...) are any of its keys."""
    if storage.indices is None:
        columns = torch.arange(storage.length, device=keys.device).expand(*keys.shape[:2], -1)
    else:
        columns = with_appended(storage.indices.long(), storage.appended, seen)
    visible = storage.visible()
    return columns if visible is None else columns.masked_fill(~visible, -1)


def rows_of(part: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """Return some rows of a tensor (batch, ...), if there is one."""
    return None if part is None else part[rows]


def with_appended(columns: torch.Tensor, new: int, seen: int) -> torch.Tensor:
    """Add to columns (batch, kv_heads, slots) those of `new` appended tokens, which end with `seen`."""
    appended = torch.arange(seen - new, seen, device=columns.device).expand(*columns.shape[:2], -1)
    return torch.cat([columns, appended], dim=2)


def lasting(make: Callable[..., _Made], *args: object, **kwargs: object) -> _Made:
    """Return `make(*args, **kwargs)`, tensors that can be written in place outside of a `torch.inference_mode` that
    they are created in."""
    with torch.inference_mode(False), torch.no_grad():
        return make(*args, **kwargs)
