"""NVIDIA/kvpress, pull request 285, dropkv_press.py: the authors of DropKV offer their code there."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

from . import presses
from .script import Recordings, run

COMMIT = "7fb862554f556ef075dfac299509aa839cdca94c"  # of `git fetch origin pull/285/head`
SMALL = {"window_size": 8, "kernel_size": 1}

DIFFERENCES = {"dropkv": (0.96, "their squared length is multiplied out, and large terms cancel in fp32")}


def recordings(checkout: Path) -> Recordings:
    stand_ins = {"presses.scorer_press": SimpleNamespace(ScorerPress=Scorer)}
    theirs = presses.load(checkout, "dropkv", stand_ins=stand_ins)["DropKVPress"]
    runs = [("dropkv", {}, theirs), ("dropkv, window_size=8, kernel_size=1", SMALL, partial(theirs, **SMALL))]
    return presses.record(runs, window=32, rest=0.5)


class Scorer:
    def __post_init__(self) -> None:
        pass


if __name__ == "__main__":
    run(recordings, "NVIDIA/kvpress", "presses/dropkv_press.py: DropKVPress", COMMIT)
