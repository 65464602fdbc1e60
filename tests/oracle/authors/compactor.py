"""NVIDIA/kvpress, where an author of Compactor has its parts and the whole: leverage_press.py,
non_causal_attention_press.py, compactor_press.py. Its Gaussian is a new one at each call; here it is ours."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from kvcompress.clusters.leverage import gaussian

from . import presses
from .script import Recordings, run
from .states import NAMES, cases, states

CHUNK, ENDS = 16, 8 + 4  # Compactor's sinks and recent tokens stand outside the chunks

BLENDED = f"compactor, chunk_size={CHUNK}, blending=0.5"
FILLED = "its last chunk is filled up with tokens that attend, and are attended to"
SQUARE = "it draws a Gaussian that is larger than a key, whose dimensions the ridge then weighs differently"
TIED = "what must stay has the layer's best score, so that where it has no room the best other token may go before it"
PROMPTS = [(name, length) for name in NAMES for length in (states(name).prompt, states(name).prompt // 3)]
DIFFERENCES = {
    "leverage/tiny": (0.91, SQUARE),
    "non-causal-attention/": (0.84, FILLED),
    "compactor/": (0.89, FILLED),
    **{
        f"{label}/{name}/{length}+": (0.89, FILLED)
        for label, ends in ((f"non-causal-attention, chunk_size={CHUNK}", 0), (BLENDED, ENDS))
        for name, length in PROMPTS
        if (length - ends) % CHUNK
    },
    **{
        f"{label}, variant=kvpress/{name}/{prompt}+0/{budget}": (0.9, TIED)
        for label in ("compactor", BLENDED)
        for name in NAMES
        for prompt, budget in cases(name)
        if budget < ENDS
    },
}


def recordings(checkout: Path) -> Recordings:
    theirs = presses.load(checkout, "scorer", "leverage", "non_causal_attention", "compactor")
    leverage, non_causal, compactor = (
        theirs[f"{name}Press"] for name in ("LeverageScore", "NonCausalAttn", "Compactor")
    )

    def ours(*shape: int, **kwargs: object) -> torch.Tensor:
        *_, head_dim, sketch = shape
        return gaussian(head_dim, sketch, seed=0).expand(shape) * sketch**0.5

    sys.modules["kvpress.presses.leverage_press"].torch = SimpleNamespace(**{**vars(torch), "randn": ours})

    runs = [
        ("leverage", {}, leverage),
        ("leverage, sketch=16", {"sketch": 16}, partial(leverage, sketch_dimension=16)),
        ("non-causal-attention", {}, non_causal),
        (f"non-causal-attention, chunk_size={CHUNK}", {"chunk_size": CHUNK}, partial(non_causal, chunk_size=CHUNK)),
        ("compactor", {}, compactor),
        (BLENDED, {"chunk_size": CHUNK, "blending": 0.5}, partial(compactor, chunk_size=CHUNK, blending=0.5)),
    ]
    runs += [
        (f"{label}, variant=kvpress", {**options, "variant": "kvpress"}, make)
        for label, options, make in runs
        if "sketch" not in options
    ]
    return presses.record(runs)


if __name__ == "__main__":
    functions = "presses: LeverageScorePress, NonCausalAttnPress, CompactorPress, ScorerPress.compress"
    run(recordings, "NVIDIA/kvpress", functions)
