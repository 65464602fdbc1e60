"""`batch_size=auto`: as many prompts per batch as fit into memory."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from kvcompress import KVCompressError
from kvcompress.errors import plain_number, shown

MOST = 64  # prompts per batch, unless `max_batch_size` says otherwise
# The part of the free memory that a batch may take. What is tried on a GPU is known to fit; a CPU's memory belongs to
# other processes too, and a process that takes too much of it is killed.
SHARES = {"cuda": 0.9, "mps": 0.7, "cpu": 0.5}
# Of a container: its limit, and what it uses, both in bytes.
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


@dataclass(frozen=True)
class Trial:
    """A batch that was tried, in bytes.

    Attributes:
        peak: what it took at most, beyond what was in use before.
        certain: what its inputs and its KV cache have, which no peak that was measured too low goes below.
    """

    peak: int
    certain: int


def batch_size(value: Any) -> int | str:
    """A number, `auto` or `auto:N`, as it was given on some command line. Raises KVCompressError."""
    if isinstance(value, str) and re.fullmatch(r"auto(:[1-9][0-9]{0,5})?", value):
        return value
    try:
        number = plain_number(value, int)
    except ValueError:
        number = None
    if not isinstance(number, int | float) or number < 1 or number != int(number):
        raise KVCompressError(f"batch_size={shown(value)} is neither a positive number, nor auto, nor auto:N")
    return int(number)


def searches(size: int | str) -> int:
    """How often the size is looked for among the prompts of one kind, longest first: N of `auto:N`."""
    return int(str(size).partition(":")[2] or 1)


def largest_batch(try_batch: Callable[[int], Trial | None], room: int, most: int, may_fail: bool) -> int:
    """How many of the longest prompts are answered in one batch.

    Batches of one and of two tell what a row takes, and with it how many fit.

    Args:
        try_batch: answers a batch of so many prompts, and tells what that took; None where memory did not suffice.
        room: bytes that a batch may take.
        most: prompts.
        may_fail: whether too large a batch can be tried without harm: then what was counted is tried.
    """
    if most == 1 or (one := try_batch(1)) is None or (two := try_batch(2)) is None:
        return 1
    a_row = max(two.peak - one.peak, two.certain - one.certain, 1)
    size = min(most, max(1, 1 + (room - max(one.peak, one.certain)) // a_row))
    if may_fail:
        while size > 2 and try_batch(size) is None:
            size = (size + 2) // 2
    return size


def used_memory(device: torch.device) -> int:
    """Bytes in use now, of the kind that `kvcompress.device.peak_memory` gives the peak of."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return psutil.Process().memory_info().rss


def free_memory(device: torch.device) -> int:
    """Bytes that are left for this process: on the device, or for a CPU on the machine or in its container."""
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
    """The bytes that `largest_batch` may count on."""
    return int(free_memory(device) * SHARES.get(device.type, SHARES["cpu"]))
