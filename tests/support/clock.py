"""A check that a clock is only read while the device is idle."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompress import device
from kvcompress.bench import standalone


class Work(TorchDispatchMode):
    """Records whether the device was given work since the last wait for it."""

    is_pending = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.is_pending = True
        return function(*args, **(kwargs or {}))


@contextmanager
def synchronised_reads(*modules: ModuleType) -> Iterator[list[str]]:
    """Context manager that yields the places in our code that read `time.perf_counter`.

    Raises AssertionError if the device may have been working. In `modules` the function `synchronise` waits for it."""
    work, reads, read = Work(), [], time.perf_counter

    def synchronise(device: torch.device) -> None:
        work.is_pending = False

    def perf_counter() -> float:
        frame = sys._getframe(1)
        while frame.f_code.co_name in ("_now", "now"):
            frame = frame.f_back
        name = frame.f_globals["__name__"]
        if name.split(".")[0] in ("kvcompress", "lmms_eval_plugins"):
            place = f"{name}:{frame.f_lineno}"
            assert not work.is_pending, f"{place} reads the clock while the device may be at work"
            reads.append(place)
        return read()

    with pytest.MonkeyPatch.context() as patch:
        for module in (device, *modules):
            patch.setattr(module, "synchronise", synchronise)
        patch.setattr(time, "perf_counter", perf_counter)
        patch.setitem(standalone.CLOCKS, "wall", perf_counter)
        with work:
            yield reads
