"""`batch_size=auto`: as many prompts per batch as fit into memory."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcompress import KVCompressError
from kvcompress.errors import plain_number, shown

MOST_SLOTS = 256
MOST = 64  # prompts per batch, unless `max_batch_size` says otherwise
# The share of free memory that a batch may take. On a GPU the size is tried before it is used; on a CPU, other
# processes share the memory, and a process that takes too much is killed.
SHARES = {"cuda": 0.9, "mps": 0.7, "cpu": 0.5}
# A container's memory limit and its memory in use, both in bytes.
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


class PeakOfTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that are created in this context and alive at the same time.

    The process's own memory would say less: it keeps memory that was freed, and a small batch reuses it unnoticed.

    Attributes:
        peak: the largest count so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        known = self._storages.get(storage._cdata)
        if known is not None and not known[0].expired():
            return
        if known is not None:  # a new storage at the address of a freed one
            self._live -= known[1]
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live += storage.nbytes()
        if self._live > self.peak:
            self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
            self._live = sum(size for _, size in self._storages.values())
            self.peak = max(self.peak, self._live)


def number_or_auto(value: Any) -> int | str:
    """Parse a batch size, `auto` or `auto:N` from a command line. Raises KVCompressError."""
    if isinstance(value, str) and re.fullmatch(r"auto(:[1-9][0-9]{0,5})?", value):
        return value
    return _count("batch_size", value, "auto, nor auto:N")


def number_of_slots(value: Any) -> int | str | None:
    """Parse a number of slots or `auto` from a command line. Raises KVCompressError."""
    return value if value in (None, "auto") else _count("slots", value, "auto")


def _count(name: str, value: Any, others: str) -> int:
    try:
        number = plain_number(value, int)
    except ValueError:
        number = None
    if not isinstance(number, int | float) or number < 1 or number != int(number):
        raise KVCompressError(f"{name}={shown(value)} is neither a positive number, nor {others}")
    return int(number)


def searches(size: int | str) -> int:
    """Return how often the batch size is searched for among prompts with the same settings: N of `auto:N`, else 1."""
    return int(str(size).partition(":")[2] or 1)


def largest_batch(try_batch: Callable[[int], int | None], room: int, most: int, may_fail: bool) -> int:
    """Return how many of the longest prompts fit in one batch.

    Batches of one and of two prompts show how many bytes each further prompt takes.

    Args:
        try_batch: answers a batch of the given size and returns its peak bytes, or None if it ran out of memory.
        room: bytes that a batch may take.
        most: the largest number of prompts to return.
        may_fail: whether running out of memory does no harm; the computed size is then tried before it is returned.
    """
    if most == 1 or (one := try_batch(1)) is None or (two := try_batch(2)) is None:
        return 1
    size = min(most, max(1, 1 + (room - one) // max(two - one, 1)))
    if may_fail:
        while size > 2 and try_batch(size) is None:
            size = (size + 2) // 2
    return size


def free_memory(device: torch.device) -> int:
    """Return the bytes free for this process: on the device, or, for a CPU, on the machine or in its container."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = psutil.virtual_memory().available
    for limit, used in CGROUPS:
        if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
            free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)


def room_for_a_batch(device: torch.device) -> int:
    """Return the bytes that a batch may take on `device`."""
    return int(free_memory(device) * SHARES.get(device.type, SHARES["cpu"]))
