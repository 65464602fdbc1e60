"""THU-MIG/PrefixKV: layer sizes found for the prompt itself (`profile`); decoding empties one slot, each step."""

import os
import sys
import tempfile
from pathlib import Path

import torch

from .recording import Recording, save
from .released import attention, definitions
from .states import DECODED, NAMES, cases, states

FILE = "prefixkv.py"
CLASS = "PrefixKV"
DECODING = ("smollm2", "random_mha", "tiny")

FOUND = "their search for the common part stops five entries early, and rounds each layer's size down"
DIFFERENCES = {
    "prefixkv/": (0.87, FOUND),
    **{f"prefixkv/{name}": (0.94, FOUND) for name in ("random_gqa/300", "random_mha/300", "smollm2/464", "tiny/378")},
}


def main() -> None:
    checkout = Path(sys.argv[1]).resolve()
    slices = {"DIM_TO_SLICE": {2: lambda x, start, end: x[:, :, start:end]}, "json": __import__("json")}
    theirs = definitions(checkout / FILE, CLASS, "obtain_cdf_num", **slices)[CLASS]

    def recording(name: str, prompt: int, budget: int, decoded: int, **options) -> Recording:
        given = states(name)
        cache = theirs(layer_num=given.layers, ratio=1 - budget / prompt, profile=True)
        held = [[torch.arange(prompt).view(1, 1, -1, 1)] * 2 for _ in range(given.layers)]
        weights = [attention(*given.layer(place, slice(0, prompt))[:2]) for place in range(given.layers)]
        held = cache(held, prompt, weights)
        for step in range(prompt, prompt + decoded):
            held = [[torch.cat([part, torch.full((1, 1, 1, 1), step)], 2) for part in layer] for layer in held]
            held = cache(held, prompt, [torch.zeros(1, 1, 1, 1)] * given.layers)
        kept = torch.zeros(given.layers, given.keys.shape[1], prompt + decoded, dtype=torch.bool)
        for layer, (columns, _) in zip(kept, held, strict=True):
            layer[:, columns.flatten()] = True
        return Recording("prefixkv", "prefixkv", options, name, prompt, budget, kept, decoded)

    recordings = []
    with tempfile.TemporaryDirectory() as folder:  # they note the sizes in a file
        os.chdir(folder)
        Path("samples").mkdir()
        for name in NAMES:
            for prompt, budget in cases(name):
                if budget >= prompt:
                    continue  # nothing is to be found
                recordings.append(recording(name, prompt, budget, 0))
                if name in DECODING and prompt == states(name).prompt:
                    recordings.append(recording(name, prompt, budget, DECODED, decode_budget=budget))
    save("prefixkv", recordings, "THU-MIG/PrefixKV", checkout, f"{FILE}: {CLASS}")


if __name__ == "__main__":
    main()
