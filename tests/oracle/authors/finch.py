"""NVIDIA/kvpress, finch_press.py: the question is a window of 32 tokens, keys stay as they are rotated."""

from functools import partial
from pathlib import Path

from . import presses
from .script import Recordings, run

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    theirs = presses.load(checkout, "finch")["FinchPress"]

    def make(window_size: int = 32, normalize: bool = True) -> object:
        press = theirs(normalize_scores=normalize, rerotate_keys=False)
        press.window_size = window_size
        return press

    runs = (
        ("finch", {}),
        ("finch, window_size=8", {"window_size": 8}),
        ("finch, window_size=8, normalize=False", {"window_size": 8, "normalize": False}),
    )
    return presses.record([(label, options, partial(make, **options)) for label, options in runs], window=32)


if __name__ == "__main__":
    run(recordings, "NVIDIA/kvpress", "presses/finch_press.py: FinchPress")
