"""NVIDIA/kvpress, where the authors of CriticalKV (criticalkv_press.py) and of ChunkKV (chunkkv_press.py) have their
code, both over its SnapKV. Chunks are whole there: the budget is what they hold."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from . import presses
from .script import Recordings, run
from .states import ratio_of

ADAPTIVE = {"head_budget": "adaptive-kvpress"}

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    theirs = presses.load(checkout, "snapkv", "criticalkv", "chunkkv")

    def over_snapkv(press: str, window: int = 32, **settings: int) -> object:
        return theirs[press](theirs["SnapKVPress"](window_size=window), **settings)

    runs = [
        ("chunkkv", {}, partial(over_snapkv, "ChunkKVPress")),
        ("chunkkv, chunk_size=10", {"chunk_size": 10}, partial(over_snapkv, "ChunkKVPress", chunk_length=10)),
        ("criticalkv", {}, partial(over_snapkv, "CriticalKVPress")),
        ("criticalkv, window_size=8", {"window_size": 8}, partial(over_snapkv, "CriticalKVPress", 8)),
        ("criticalkv, head_budget=adaptive-kvpress", ADAPTIVE, partial(over_snapkv, "CriticalAdaKVPress")),
    ]
    for recording in presses.record(runs, window=32, rest=0.5):
        held = int(recording.kept.sum()) // recording.kept.shape[:2].numel()
        asked = (recording.states, recording.prompt, recording.budget)
        yield replace(recording, budget=held, ratio=None if held == recording.budget else ratio_of(*asked))


if __name__ == "__main__":
    functions = "kvpress/presses: SnapKVPress, CriticalKVPress, CriticalAdaKVPress, ChunkKVPress"
    run(recordings, "NVIDIA/kvpress", functions)
