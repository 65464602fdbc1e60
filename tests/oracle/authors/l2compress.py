"""alessiodevoto/l2compress: its cut of a prompt by key norms, in every layer."""

import sys
from pathlib import Path

import torch

from .recording import Recording, kept_columns, save
from .states import NAMES, cases, states

DIFFERENCES: dict[str, tuple[float, str]] = {}


def main() -> None:
    checkout = Path(sys.argv[1])
    sys.path.insert(0, str(checkout))
    from cache import l2_compress

    recordings = []
    for name in NAMES:
        given = states(name)
        for prompt, budget in cases(name):
            past = [given.layer(place, slice(0, prompt))[1:] for place in range(given.layers)]
            short = l2_compress(past, keep_ratio=(budget - 0.5) / prompt, prune_after=0)  # they round up
            kept = [kept_columns(k[0], keys[0]) for (k, _), (keys, _) in zip(short, past, strict=True)]
            recordings.append(Recording("knorm", "knorm", {}, name, prompt, budget, torch.stack(kept)))
    save("l2compress", recordings, "alessiodevoto/l2compress", checkout, "cache.py: l2_compress")


if __name__ == "__main__":
    main()
