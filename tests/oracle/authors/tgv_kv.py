"""Danielement321/TGV-KV: layers and vision tokens by the question's attention; decoding evicts, each step."""

from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording
from .released import attention, definitions
from .script import Recordings, prompts, run
from .states import DECODED, NAMES, WITH_IMAGE, states

FILE = "kv_caches/tgv_kv.py"
CLASS = "TGVKVCache"
DECODING = ("smollm2_image", "random_mha", "tiny")

ROUNDED = "each layer's size is rounded by itself there"
GROWS = f"{ROUNDED}; so a layer grows at other steps, in which it evicts nothing"
DIFFERENCES = {
    "tgv-kv/": (0.98, ROUNDED),
    "tgv-kv/smollm2_image/464+64": (0.95, GROWS),
    "tgv-kv/tiny/378+64": (0.95, GROWS),
    "tgv-kv/random_mha/300+64": (0.87, GROWS),
    "tgv-kv, fixed size/": (0.96, f"{ROUNDED}, while decoding up"),
    "tgv-kv, fixed size/random_mha/300+64/15": (0.88, f"{ROUNDED}, while decoding up"),
}


def recordings(checkout: Path) -> Recordings:
    colours = SimpleNamespace(YELLOW="", RESET="")
    theirs = definitions(checkout / FILE, CLASS, Fore=colours, DynamicCache=list)[CLASS]

    def recording(label: str, name: str, prompt: int, budget: int, decoded: int, **options) -> Recording:
        """Theirs is told how many tokens there are so far, and keeps the same part of them; with `decode_budget` it is
        told that there are no more than the prompt's."""
        given = states(name)
        cache = theirs(layer_num=given.layers, image_token_id=1, ratio=1 - budget / prompt)
        ids = torch.zeros(1, prompt + decoded, dtype=torch.long)
        ids[:, slice(*given.vision)] = 1
        # In place of keys and values: the column of each entry.
        held = [[torch.arange(prompt).view(1, 1, -1, 1)] * 2 for _ in range(given.layers)]
        weights = [attention(*given.layer(place, slice(0, prompt))[:2]) for place in range(given.layers)]
        held = cache(held, prompt, weights, ids[:, :prompt])
        for step in range(prompt, prompt + decoded):
            held = [[torch.cat([part, torch.full((1, 1, 1, 1), step)], 2) for part in layer] for layer in held]
            weights = []
            for place, (columns, _) in enumerate(held):
                queries, keys, _ = given.layer(place, slice(0, step + 1))
                stored = keys[:, :, columns.flatten()].repeat_interleave(given.groups, 1).double()
                logits = queries[:, :, -1:].double() @ stored.transpose(2, 3) / keys.shape[3] ** 0.5
                weights.append(logits.softmax(-1))
            held = cache(held, prompt if "decode_budget" in options else step + 1, weights, ids[:, : step + 1])
        kept = torch.zeros(given.layers, given.keys.shape[1], prompt + decoded, dtype=torch.bool)
        for layer, (columns, _) in zip(kept, held, strict=True):
            layer[:, columns.flatten()] = True
        return Recording(label, "tgv-kv", options, name, prompt, budget, kept, decoded)

    for name, prompt, budget in prompts((*WITH_IMAGE, *NAMES)):
        if not 0 < states(name).vision[1] < prompt:
            continue  # without an image, and a question behind it, there is nothing to divide by
        yield recording("tgv-kv", name, prompt, budget, 0)
        if name not in DECODING:
            continue
        part = {"decode_ratio": budget / prompt}
        yield recording("tgv-kv", name, prompt, budget, DECODED, **part)
        yield recording("tgv-kv, fixed size", name, prompt, budget, DECODED, decode_budget=budget)


if __name__ == "__main__":
    run(recordings, "Danielement321/TGV-KV", f"{FILE}: {CLASS}")
