"""NVIDIA/kvpress, where an author of Compactor has its parts and the whole: leverage_press.py,
non_causal_attention_press.py, compactor_press.py. Its Gaussian is a new one at each call; here it is ours."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from kvcompress.clusters.leverage import gaussian

from .recording import Recording, kept_columns, save
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


def main() -> None:
    checkout = Path(sys.argv[1])
    for name in ("kvpress", "kvpress.presses"):  # its own __init__ wants other libraries
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(checkout / name.replace(".", "/"))]
    utils = sys.modules["kvpress.utils"] = ModuleType("kvpress.utils")
    utils.extract_keys_and_values = None
    utils.get_prerope_key_states = lambda module, hidden: module.keys[:, :, hidden[0, :, 0]]
    utils.get_prerope_query_states = lambda module, hidden: module.queries[:, :, hidden[0, :, 0]]
    presses = {}
    for name in ("scorer", "leverage", "non_causal_attention", "compactor"):
        presses |= vars(import_module(f"kvpress.presses.{name}_press"))

    def ours(*shape: int, **kwargs: object) -> torch.Tensor:
        *_, head_dim, sketch = shape
        return gaussian(head_dim, sketch, seed=0).expand(shape) * sketch**0.5

    sys.modules["kvpress.presses.leverage_press"].torch = SimpleNamespace(**{**vars(torch), "randn": ours})

    def keep(press: object, name: str, place: int, prompt: int) -> torch.Tensor:
        given, tokens = states(name), slice(0, prompt)
        queries, keys, values = given.layer(place, tokens)
        module = SimpleNamespace(
            head_dim=keys.shape[-1],
            queries=queries,  # rotated already: they are given cos 1 and sin 0
            keys=given.rotary(tokens).unrotated(keys),
        )
        hidden = torch.arange(prompt)[None, :, None]  # tokens by their number
        rotation = (torch.ones(1, prompt, 1), torch.zeros(1, prompt, 1))
        stays, _ = press.compress(module, hidden, keys, values, None, {"position_embeddings": rotation})
        return kept_columns(stays[0], keys[0])

    runs = [
        ("leverage", {}, lambda: presses["LeverageScorePress"]()),
        ("leverage, sketch=16", {"sketch": 16}, lambda: presses["LeverageScorePress"](sketch_dimension=16)),
        ("non-causal-attention", {}, lambda: presses["NonCausalAttnPress"]()),
        (
            f"non-causal-attention, chunk_size={CHUNK}",
            {"chunk_size": CHUNK},
            lambda: presses["NonCausalAttnPress"](chunk_size=CHUNK),
        ),
        ("compactor", {}, lambda: presses["CompactorPress"]()),
        (
            BLENDED,
            {"chunk_size": CHUNK, "blending": 0.5},
            lambda: presses["CompactorPress"](chunk_size=CHUNK, blending=0.5),
        ),
    ]
    runs += [
        (f"{label}, variant=kvpress", {**options, "variant": "kvpress"}, make)
        for label, options, make in runs
        if "sketch" not in options
    ]
    recordings = []
    for name in NAMES:
        for prompt, budget in cases(name):
            if budget >= prompt:
                continue  # a ratio cannot be negative
            for label, options, make in runs:
                press = make()
                press.compression_ratio = 1 - (budget + 1e-3) / prompt  # it keeps int((1 - ratio) * length)
                kept = torch.stack([keep(press, name, place, prompt) for place in range(states(name).layers)])
                recordings.append(Recording(label, label.split(",")[0], options, name, prompt, budget, kept))
    functions = "presses: LeverageScorePress, NonCausalAttnPress, CompactorPress, ScorerPress.compress"
    save("compactor", recordings, "NVIDIA/kvpress", checkout, functions)


if __name__ == "__main__":
    main()
