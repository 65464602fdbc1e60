"""Counters of a device's kernels and bytes and the host's waits, with the lines of code that caused them."""

import sys
from collections import Counter
from dataclasses import dataclass, field

import torch

# Kernels per operation, where it is not one.
KERNELS = {
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"), 0),
    **dict.fromkeys(("_local_scalar_dense", "is_same_size"), 0),
    **dict.fromkeys(("masked_fill", "scatter", "index_put", "index_copy", "index_add", "slice_scatter"), 2),
    **dict.fromkeys(("topk", "sort", "argsort", "nonzero", "repeat_interleave"), 3),
    "multinomial": 4,
    "_unique2": 5,
}
GATHERS = {"index_select", "gather", "index", "embedding"}  # read only the selected elements
SCATTERS = {"index_copy_", "index_put_", "scatter_", "index_add_", "_index_put_impl_"}  # write only the given elements


@dataclass
class Counts:
    """The counters.

    Attributes:
        kernels, bytes: kernels launched, and the bytes that they read and write.
        waits: how often the host waits for the device.
        kernels_at, waits_at: the same by the line of code that causes them.
    """

    kernels: int = 0
    bytes: int = 0
    waits: int = 0
    kernels_at: Counter = field(default_factory=Counter)
    waits_at: Counter = field(default_factory=Counter)

    def launch(self, name: str, kernels: int, size: int) -> None:
        self.kernels += kernels
        self.bytes += size if kernels else 0
        if kernels:
            self.kernels_at[place()] += kernels

    def wait(self, why: str) -> None:
        self.waits += 1
        self.waits_at[f"{place()} {why}"] += 1


def place() -> str:
    """Return the innermost line of this package on the stack, otherwise of transformers."""
    frame, other = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        own = file.rpartition("/kvcompress/")[2] if "/kvcompress/" in file else ""
        if own and not own.startswith(("bench/", "__main__", "command_line")):
            return f"{own}:{frame.f_lineno}"
        if not other and "/transformers/" in file:
            other = f"transformers/{file.rpartition('/transformers/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return other or "elsewhere"


def touched(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that a kernel touches; expanded dimensions count once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


def traffic(name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    if name in SCATTERS:
        sizes = [touched(tensor) for tensor in given[1:]]
        return sum(sizes) + max(sizes, default=0)
    if name in GATHERS:
        return 2 * sum(map(touched, made)) + sum(map(touched, given[1:]))
    each = {(tensor.data_ptr(), tensor.shape, tensor.stride()): touched(tensor) for tensor in [*given, *made]}
    return sum(each.values())
