"""The benchmark's grid: contenders take turns at every prompt length and batch, and each such cell is saved."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch

from ..device import release_memory
from .contenders import Contender, Workload
from .results import Results, say
from .timing import CLOCKS, synchronise

COPIES = 10
T = TypeVar("T")


def measure_cell(contenders: dict[str, Contender], workload: Workload, repeats: int) -> dict[str, Any]:
    """Return name -> {"turns": a dict of each `Turn`}, or {"error"} if memory ran out.

    Each contender takes one turn to warm up and compile. Then all take `repeats` turns, each round starting with
    another contender, so that other load on the machine and the predecessor's effects affect all of them. One that
    holds memory from turn to turn takes its turns after the others, whose memory would count it."""
    taken: dict[str, Any] = {name: {"turns": []} for name in contenders}
    apart = [name for name, contender in contenders.items() if contender.holds_memory]
    _take_turns(contenders, [name for name in contenders if name not in apart], workload, repeats, taken)
    for name in apart:
        _take_turns(contenders, [name], workload, repeats, taken)
        contenders[name].let_go()
        release_memory()
    return taken


def _take_turns(
    contenders: dict[str, Contender], names: list[str], workload: Workload, repeats: int, taken: dict[str, Any]
) -> None:
    for repeat in range(repeats + 1 if names else 0):
        what = f"turn {repeat} of {repeats}" if repeat else "warming up"
        say(f"{workload.length} tokens, batch {workload.batch}: {what}")
        begin = repeat % len(names)
        with garbage_left():
            for name in names[begin:] + names[:begin]:
                if "error" in taken[name]:
                    continue
                turn = attempt(partial(contenders[name].turn, workload))
                if turn is None:
                    taken[name] = {"error": "out of memory"}
                elif repeat:
                    taken[name]["turns"].append(asdict(turn))


@contextmanager
def garbage_left() -> Iterator[None]:
    """Collect garbage first and disable collection inside, so that it does not interrupt a turn."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def attempt(call: Callable[[], T]) -> T | None:
    """Return the call's result, or None after freeing its memory if memory ran out."""
    try:
        return call()
    except torch.OutOfMemoryError:
        pass  # the exception holds on to the tensors until here
    release_memory()
    return None


def copy_bandwidth(device: torch.device, nbytes: int | None = None, clock: str = "wall") -> float:
    """Return the bytes per second read and written by the best of ten copies of `nbytes`.

    The default, 1 GiB on CUDA and 256 MiB elsewhere, is more than any cache holds."""
    nbytes = nbytes or (1 << 30 if device.type == "cuda" else 1 << 28)
    here = torch.ones(nbytes, dtype=torch.uint8, device=device)
    there = torch.zeros_like(here)
    best = float("inf")
    for _ in range(COPIES):
        synchronise(device)
        start = CLOCKS[clock]()
        there.copy_(here)
        synchronise(device)
        best = min(best, CLOCKS[clock]() - start)
    return 2 * nbytes / best


def largest_batch(fits: Callable[[int], bool]) -> int:
    """Find the largest batch for which `fits` is true (0 if none): double until it fails, then bisect."""
    fitting, failing = 0, 1
    while fits(failing):
        fitting, failing = failing, 2 * failing
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        fitting, failing = (middle, failing) if fits(middle) else (fitting, middle)
    return fitting


def decodes(contender: Contender, workload: Workload) -> bool:
    """Return whether a turn fits into memory, after freeing what earlier turns left."""
    release_memory()
    return attempt(partial(contender.turn, workload)) is not None


def measure_grid(
    results: Results,
    contenders: dict[str, Contender],
    workloads: Iterable[Workload],
    repeats: int,
    device: torch.device,
    seconds: float = float("inf"),
) -> None:
    """Measure the cells that are not yet in the results; start no further cell after `seconds`."""
    end = time.monotonic() + seconds
    for workload in workloads:
        if results.has("cells", length=workload.length, batch=workload.batch):
            continue
        if time.monotonic() > end:
            say(f"{workload.length} tokens, batch {workload.batch}: skipped, out of time")
            continue
        torch._dynamo.reset()
        bandwidth = copy_bandwidth(device, clock=workload.clock)
        # Every compiled contender keeps its own graph of the same code.
        with torch._dynamo.config.patch(recompile_limit=4 * len(contenders)):
            taken = measure_cell(contenders, workload, repeats)
        cell = {"length": workload.length, "batch": workload.batch, "copy_bytes_per_s": bandwidth, "ways": taken}
        results.add("cells", cell)
