"""kvpress 0.5.5 from the package index (entropy_gated_chunkkv_press.py, over its SnapKV); CHECKOUT is the folder that
it was installed into."""

import sys
from functools import partial
from importlib import metadata
from pathlib import Path

from . import presses
from .script import Recordings, run

LABEL = "entropy-gated-chunkkv"
TIES = "of the window's tokens, which score alike, top-k takes any; see test_named_differences.py"
DIFFERENCES = {f"{LABEL}/": (0.97, TIES), f"{LABEL}, ": (0.84, TIES)}


def recordings(checkout: Path) -> Recordings:
    theirs = presses.load(checkout, "snapkv", "entropy_gated_chunkkv")
    snapkv = theirs["SnapKVPress"]

    def make(window: int = 32, **settings: int) -> object:
        return theirs["EntropyGatedChunkKVPress"](snapkv(window_size=window), **settings)

    small = {"window_size": 8, "chunk_size": 16, "spiky_size": 2}
    runs = [
        (LABEL, {}, make),
        (f"{LABEL}, window_size=8", {"window_size": 8}, partial(make, 8)),
        (f"{LABEL}, chunk_size=16, spiky_size=2", small, partial(make, 8, chunk_length=16, low_entropy_chunk_length=2)),
    ]
    return presses.record(runs, window=32)


if __name__ == "__main__":
    version = "v" + next(metadata.distributions(name="kvpress", path=[sys.argv[1]])).version
    functions = "presses/entropy_gated_chunkkv_press.py: EntropyGatedChunkKVPress"
    run(recordings, "NVIDIA/kvpress", functions, version)
