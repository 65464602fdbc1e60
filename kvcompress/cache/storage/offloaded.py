"""Entries in the CPU's memory."""

import torch

from .base import Storage


class OffloadedStorage(Storage):
    """Another storage in the CPU's memory: its entries come to the device for the one layer that attends, and the next
    layer's are on their way meanwhile.

    Args:
        inner: a storage on the CPU.
        device: where the model computes.
    """

    def __init__(self, inner: Storage, device: torch.device):
        self.inner, self.device = inner, device
        self.fetched: tuple[torch.Tensor, ...] | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def length(self) -> int:
        return self.inner.length

    @property
    def is_whole(self) -> bool:
        return self.inner.is_whole

    @property
    def fills_all_slots(self) -> bool:
        return self.inner.fills_all_slots

    @property
    def appended(self) -> int:
        return int(self.inner.appended)

    def prefetch(self) -> None:
        """Start bringing the entries to the device, beside what it is computing."""
        if self.stream is not None and self.fetched is None:
            with torch.cuda.stream(self.stream):
                self.fetched = tuple(part.pin_memory().to(self.device, non_blocking=True) for part in self.inner.read())

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.inner.append(keys.cpu(), values.cpu())
        if self.fetched is None:
            return
        fetched, new = self._arrived(), (keys, values)
        if self.inner.has_fixed_shapes:  # the buffers have room
            first = int(self.inner.cursor) - keys.shape[2]
            for buffer, part in zip(fetched, new, strict=True):
                buffer[:, :, first : first + keys.shape[2]] = part
            return
        self.fetched = tuple(torch.cat([old, part], dim=2) for old, part in zip(fetched, new, strict=True))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fetched is None:
            return tuple(part.to(self.device) for part in self.inner.read())
        fetched, self.fetched = self._arrived(), None  # the device holds one layer's entries at a time
        return fetched

    def _arrived(self) -> tuple[torch.Tensor, ...]:
        """What was fetched, once it is there. Its memory, which is the copying stream's, is not given to the next copy
        before the stream that computes has read it."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for part in self.fetched:
            part.record_stream(current)
        return self.fetched

    def visible(self) -> torch.Tensor | None:
        visible = self.inner.visible()
        return None if visible is None else visible.to(self.device)

    def columns(self, seen: int) -> torch.Tensor:
        return self.inner.columns(seen).to(self.device)

    def fork(self) -> "OffloadedStorage":
        twin = super().fork()
        twin.inner, twin.fetched = self.inner.fork(), None
        return twin

    def select(self, rows: torch.Tensor) -> None:
        self.inner.select(rows.cpu())
        self.fetched = None

    def tensors(self) -> list[torch.Tensor]:
        return self.inner.tensors()

    @property
    def room_nbytes(self) -> int:
        return self.inner.room_nbytes
