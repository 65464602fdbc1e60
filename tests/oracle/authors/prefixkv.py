"""THU-MIG/PrefixKV: layer sizes found for the prompt itself (`profile`), or before, for a part of it; decoding empties
one slot, each step."""

import json
import os
import tempfile
from pathlib import Path

import torch

from .recording import Recording
from .released import attention, definitions
from .script import Recordings, run
from .states import DECODED, NAMES, cases, states

FILE = "prefixkv.py"
CLASS = "PrefixKV"
DECODING = ("smollm2", "random_mha", "tiny")

KNOWN = "prefixkv, calibration="
TENTHS = 10  # ratios of which they have a file each

FOUND = "their search for the common part stops five entries early, and rounds each layer's size down"
ROUNDED = "each layer's size is rounded by itself there"
DIFFERENCES = {
    f"{KNOWN}/": (0.9, ROUNDED),
    "prefixkv/": (0.87, FOUND),
    **{f"prefixkv/{name}": (0.94, FOUND) for name in ("random_gqa/300", "random_mha/300", "smollm2/464", "tiny/378")},
}


def recordings(checkout: Path) -> Recordings:
    slices = {"DIM_TO_SLICE": {2: lambda x, start, end: x[:, :, start:end]}, "json": json}
    theirs = definitions(checkout / FILE, CLASS, "obtain_cdf_num", **slices)[CLASS]

    def recording(name: str, prompt: int, budget: int, decoded: int, **options) -> Recording:
        given = states(name)
        cache = theirs(layer_num=given.layers, ratio=1 - budget / prompt, profile=True)
        held = [[torch.arange(prompt).view(1, 1, -1, 1)] * 2 for _ in range(given.layers)]
        held = cache(held, prompt, _weights(name, prompt))
        for step in range(prompt, prompt + decoded):
            held = [[torch.cat([part, torch.full((1, 1, 1, 1), step)], 2) for part in layer] for layer in held]
            held = cache(held, prompt, [torch.zeros(1, 1, 1, 1)] * given.layers)
        kept = torch.zeros(given.layers, given.keys.shape[1], prompt + decoded, dtype=torch.bool)
        for layer, (columns, _) in zip(kept, held, strict=True):
            layer[:, columns.flatten()] = True
        return Recording("prefixkv", "prefixkv", options, name, prompt, budget, kept, decoded)

    def known(name: str) -> Recordings:
        """By the files that their profile makes of the first third of the prompt, at each of their ratios."""
        given, found = states(name), []
        third = given.prompt // 3
        for tenth in range(TENTHS):
            profile = theirs(layer_num=given.layers, ratio=tenth / TENTHS, profile=True)
            profile([[torch.arange(third).view(1, 1, -1, 1)] * 2] * given.layers, third, _weights(name, third))
            Path("confs").mkdir(exist_ok=True)
            ratios = [round(float(ratio), 6) for ratio in profile.ratios]
            Path(f"confs/prefixkv_None_{tenth / TENTHS}.json").write_text(json.dumps(ratios))
            found.append(ratios)
        sizes = 1 - torch.tensor(found[::-1]).T
        for kept_part in (0.5, 0.2, 0.1):
            cache = theirs(layer_num=given.layers, ratio=round(1 - kept_part, 1))
            held = [[torch.arange(given.prompt).view(1, 1, -1, 1)] * 2 for _ in range(given.layers)]
            held = cache(held, given.prompt, _weights(name, given.prompt))
            kept = torch.zeros(given.layers, given.keys.shape[1], given.prompt, dtype=torch.bool)
            for layer, (columns, _) in zip(kept, held, strict=True):
                layer[:, columns.flatten()] = True
            budget = round(kept_part * given.prompt)
            yield Recording(KNOWN, "prefixkv", {}, name, given.prompt, budget, kept, known={"sizes": sizes})

    with tempfile.TemporaryDirectory() as folder:  # they note the sizes in a file
        os.chdir(folder)
        Path("samples").mkdir()
        for name in NAMES:
            yield from known(name)
            for prompt, budget in cases(name):
                if budget >= prompt:
                    continue  # nothing is to be found
                yield recording(name, prompt, budget, 0)
                if name in DECODING and prompt == states(name).prompt:
                    yield recording(name, prompt, budget, DECODED, decode_budget=budget)


def _weights(name: str, prompt: int) -> list[torch.Tensor]:
    given = states(name)
    return [attention(*given.layer(place, slice(0, prompt))[:2]) for place in range(given.layers)]


if __name__ == "__main__":
    run(recordings, "THU-MIG/PrefixKV", f"{FILE}: {CLASS}")
