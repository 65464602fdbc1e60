"""Offloaded storage: entries in CPU memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...device import on_device
from .base import Storage, full, lasting, with_appended
from .dense import DenseStorage

TAIL = 64  # decoded tokens of a layer that are copied from the device together


@dataclass(frozen=True)
class Leaving:
    """Decoded tokens being copied to CPU memory.

    Attributes:
        tokens: their number.
        there: their keys and values on the device, which stay until `here` is complete.
        here: the same in pinned memory, complete after `arrived`.
    """

    tokens: int
    there: tuple[torch.Tensor, ...]
    here: tuple[torch.Tensor, ...]
    arrived: torch.cuda.Event


class OffloadedStorage(Storage):
    """Another storage in CPU memory, whose entries are copied to the device for each attention.

    The next layer's entries are copied meanwhile. On CUDA no step waits: copies use pinned memory, and decoded tokens
    stay on the device until there are `TAIL` of them and their copy has arrived.

    Args:
        inner: a storage on the CPU; a dense one on the device, which is moved; or a function that makes one on the CPU
            of tensors on their way there, and is called when it is needed.
        device: the device on which the model computes.
        room: number of tokens that can be appended; None for any.
    """

    def __init__(self, inner: Storage | Callable[[], Storage], device: torch.device, room: int | None = None):
        self._inner, self.device, self.room = inner, device, room
        self._left: torch.cuda.Event | None = None  # after this event the inner storage is in CPU memory
        self.fetched: tuple[torch.Tensor, ...] | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.tail: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._leaving: Leaving | None = None
        self._shown: torch.Tensor | None = None  # on CUDA, `visible` with slots for later tokens
        if self.stream is not None and isinstance(inner, DenseStorage) and inner.keys.device.type == "cuda":
            for name in ("keys", "values", "indices", "pads"):
                if (part := getattr(inner, name)) is not None:
                    setattr(inner, name, lasting(part.to, "cpu", non_blocking=True))  # into pinned memory
            self._left = torch.cuda.current_stream(device).record_event()
        elif callable(inner):
            self._left = torch.cuda.current_stream(device).record_event()
        else:
            self._pin()

    @property
    def inner(self) -> Storage:
        """The inner storage, after its copy to CPU memory is complete."""
        if self._left is not None and not self._left.query():
            self._left.synchronize()
        self._left = None
        if callable(self._inner):
            self._inner = self._inner()
            self._pin()
        return self._inner

    @property
    def _moving(self) -> Storage:
        """The inner storage, whose keys and values may still be on their way to CPU memory."""
        return self.inner if callable(self._inner) else self._inner

    def _pin(self) -> None:
        """Pin buffers that are copied as they are."""
        if self.stream is not None and isinstance(self.inner, DenseStorage) and not self.inner.keys.is_pinned():
            for name in ("keys", "values"):
                setattr(self.inner, name, lasting(getattr(self.inner, name).pin_memory))

    @property
    def room_nbytes(self) -> int:
        return self._moving.room_nbytes

    @property
    def _tail_length(self) -> int:
        return sum(keys.shape[2] for keys, _ in self.tail)

    @property
    def length(self) -> int:
        return self._moving.length + self._tail_length

    @property
    def is_whole(self) -> bool:
        return self._moving.is_whole

    @property
    def fills_all_slots(self) -> bool:
        return self._moving.fills_all_slots

    @property
    def appended(self) -> int:
        return self._moving.appended + self._tail_length

    def prefetch(self) -> None:
        """Start copying the entries to the device while it computes."""
        if callable(self._inner) and not self._left.query():
            return  # as in the pass that stores them, whose host would wait
        if self.stream is not None and self.fetched is None:
            with torch.cuda.stream(self.stream):
                if self._left is not None:
                    self.stream.wait_event(self._left)
                self.fetched = lasting(self._start_copy)

    def _start_copy(self) -> tuple[torch.Tensor, ...]:
        """Start copying the inner storage's keys and values to the device, and return them."""
        if not isinstance(self._moving, DenseStorage):
            return tuple(part.pin_memory().to(self.device, non_blocking=True) for part in self.inner.read())
        buffers = (self._inner.keys, self._inner.values)  # unchanged, including the spare room
        return tuple(part.to(self.device, non_blocking=True)[:, :, : self._inner.length] for part in buffers)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.room is not None:
            self.check_room(self.appended + keys.shape[2])
        if self.stream is None:
            self.inner.append(keys.cpu(), values.cpu())
        else:
            self.tail.append((keys.detach(), values.detach()))

    def check_room(self, appended: int) -> None:
        if self.room is not None and appended > self.room:
            raise full(self.room)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.stream is None:
            return tuple(part.to(self.device) for part in self.inner.read())
        own = self._start_copy() if self.fetched is None else self._wait_for_fetched()
        self.fetched = None  # the device holds one layer's entries at a time
        if not self.tail:
            return own
        parts = tuple(
            torch.cat([part, *new], dim=2) for part, new in zip(own, zip(*self.tail, strict=True), strict=True)
        )
        self._move_tail()
        return parts

    def _move_tail(self) -> None:
        """Start copying a long tail to CPU memory, or store the copy that has arrived."""
        leaving = self._leaving
        if leaving is None and self._tail_length >= TAIL:
            there = tuple(torch.cat(parts, dim=2) for parts in zip(*self.tail, strict=True))
            self.tail = [there]
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                here = tuple(part.to("cpu", non_blocking=True) for part in there)  # into pinned memory
                self._leaving = Leaving(there[0].shape[2], there, here, self.stream.record_event())
        elif leaving is not None and leaving.arrived.query():
            self.inner.append(*leaving.here)
            self._pin()
            self.tail, self._leaving = self.tail[1:], None

    def _wait_for_fetched(self) -> tuple[torch.Tensor, ...]:
        """Return the fetched entries, after waiting for their copy on the device.

        Their memory belongs to the copying stream; it is not reused for the next copy before the computing stream has
        read it."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for part in self.fetched:
            part.record_stream(current)
        return self.fetched

    def visible(self) -> torch.Tensor | None:
        if self._shown is not None and self._shown.shape[2] >= self.length:  # in front, slots stay as they are
            return self._shown[:, :, : self.length]
        visible = None if self.fills_all_slots else self.inner.visible()
        if visible is None:
            return None
        if self.stream is None:
            return visible.to(self.device)
        self._shown = F.pad(on_device(visible, self.device), (0, self._tail_length + 2 * TAIL), value=True)
        return self._shown[:, :, : self.length]

    def held(self) -> list[list[int]] | None:
        held = self.inner.held()
        return None if held is None else [[count + self._tail_length for count in heads] for heads in held]

    def columns(self, seen: int) -> torch.Tensor:
        tail = self._tail_length
        columns = on_device(self.inner.columns(seen - tail), self.device)
        return with_appended(columns, tail, seen) if tail else columns

    def fork(self) -> "OffloadedStorage":
        twin = super().fork()
        self.fetched = twin.fetched = twin._leaving = None
        return twin

    def __getstate__(self) -> dict[str, object]:
        """For copies: a stream and what it has under way stay behind."""
        inner = self.inner  # waits for what is leaving the device
        return {**vars(self), "_inner": inner, "_left": None, "fetched": None, "_leaving": None, "stream": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._pin()

    def select(self, rows: torch.Tensor) -> None:
        self.inner.select(rows.cpu())
        self._pin()
        self.tail = [(keys[rows], values[rows]) for keys, values in self.tail]
        self.fetched = self._leaving = self._shown = None

    def state(self) -> dict[str, object]:
        return {"inner": self.inner, "tail": self.tail, "room": self.room}

    @classmethod
    def of_state(cls, state: dict[str, object], device: torch.device) -> "OffloadedStorage":
        made = cls(state["inner"], device, state["room"])
        if made.stream is not None:
            made.tail = state["tail"]
        else:  # saved on CUDA; without it, everything is in CPU memory
            for keys, values in state["tail"]:
                made.append(keys, values)
        return made

    def tensors(self) -> list[torch.Tensor]:
        own = [] if self._shown is None else [self._shown]
        return [*self._moving.tensors(), *(part for parts in self.tail for part in parts), *own]
