"""alessiodevoto/l2compress: its cut of a prompt by key norms, in every layer."""

import sys
from pathlib import Path

import torch

from .recording import Recording, kept_columns
from .script import Recordings, run
from .states import NAMES, cases, states

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    sys.path.insert(0, str(checkout))
    from cache import l2_compress

    for name in NAMES:
        given = states(name)
        for prompt, budget in cases(name):
            past = [given.layer(place, slice(0, prompt))[1:] for place in range(given.layers)]
            short = l2_compress(past, keep_ratio=(budget - 0.5) / prompt, prune_after=0)  # they round up
            kept = [kept_columns(k[0], keys[0]) for (k, _), (keys, _) in zip(short, past, strict=True)]
            yield Recording("knorm", "knorm", {}, name, prompt, budget, torch.stack(kept))


if __name__ == "__main__":
    run(recordings, "alessiodevoto/l2compress", "cache.py: l2_compress")
