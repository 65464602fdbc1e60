"""Utilities of the speed benchmarks: interleaved repeats, their summary, the environment, tables."""

import datetime
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from ..version import __version__
from .standalone import CLOCKS, synchronise


def interleaved(
    calls: dict[str, Callable[[], object]], repeats: int, device: torch.device, clock: str = "wall"
) -> dict[str, dict]:
    """Time the calls in turns and return their milliseconds, {"median", "q1", "q3", "repeats"} each.

    Taking turns makes other load on the machine hit all of them. The first two turns warm up and are not counted.
    """
    now = CLOCKS[clock]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 2):
        for name, call in calls.items():
            synchronise(device)
            start = now()
            call()
            synchronise(device)
            times[name].append((now() - start) * 1e3)
    return {name: summary(taken[2:]) for name, taken in times.items()}


def summary(milliseconds: list[float]) -> dict:
    """Return median and quartiles; for a single number, that number."""
    if len(milliseconds) == 1:
        return {"median": milliseconds[0], "q1": milliseconds[0], "q3": milliseconds[0], "repeats": 1}
    q1, median, q3 = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "repeats": len(milliseconds)}


def cell(taken: dict) -> str:
    """Format a summary as `median (q1-q3)`."""
    return f"{short(taken['median'])} ({short(taken['q1'])}-{short(taken['q3'])})"


def short(number: float) -> str:
    """Format a number with three digits, or with all digits before the point."""
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def environment(device: torch.device) -> dict:
    """Return the hardware and versions that a benchmark ran with."""
    return {
        "date": str(datetime.date.today()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()} CPU",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvcompress": __version__,
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()


def table(header: list[str], rows: list[list], names: int | None = None) -> str:
    """Return a Markdown table. Columns are left-aligned; with `names`, all after that many are right-aligned
    numbers."""
    left = len(header) if names is None else names
    lines = [header, ["---"] * left + ["---:"] * (len(header) - left), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)
