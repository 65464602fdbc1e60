"""NVIDIA/kvpress, cap_press.py: CapKV has its home there."""

from pathlib import Path

from . import presses
from .script import Recordings, run

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    theirs = presses.load(checkout, "cap")["CapPress"]
    runs = [("capkv", {}, theirs), ("capkv, tau=20", {"tau": 20.0}, lambda: theirs(tau=20.0))]
    return presses.record(runs, unrotated=True)


if __name__ == "__main__":
    run(recordings, "NVIDIA/kvpress", "presses/cap_press.py: CapPress")
