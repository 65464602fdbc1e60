"""NVIDIA/kvpress, the home of these methods, at a newer commit than the recordings of `test_kvpress.py`: scores and
`ScorerPress`'s choice by them; and its PyramidKVPress, whose layers are SnapKV's."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from .presses import methods
from .recording import Recording, kept_columns
from .released import attention
from .script import Recordings, prompts, run
from .states import NAMES, cases, states

WINDOW = 8  # PyramidKV's
PRESSES = {
    "keydiff": ("keydiff_press.py", SimpleNamespace()),
    "cur": (
        "cur_press.py",
        SimpleNamespace(
            num_sinks=4, leverage_type="kv_product", use_random_leverage=False, use_local_approximation=True,
            local_window_size=16,
        ),
    ),
}  # fmt: skip

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    (compress,) = methods(checkout, "scorer_press.py", "compress")
    for method, (file, press) in PRESSES.items():
        (score,) = methods(checkout, file, "score")
        press.score = lambda *args, score=score, press=press: score(press, *args)
        for name, prompt, budget in prompts():
            if budget > prompt:
                continue  # a ratio cannot be negative
            press.compression_ratio, kept = 1 - (budget + 0.5) / prompt, []
            for place in range(states(name).layers):
                _, keys, values = states(name).layer(place, slice(0, prompt))
                module = SimpleNamespace(head_dim=keys.shape[-1])
                stays, _ = compress(press, module, None, keys, values, None, {})
                kept.append(kept_columns(stays[0], keys[0]))
            yield Recording(method, method, {}, name, prompt, budget, torch.stack(kept))
    yield from [
        _pyramid(checkout, name, *case, beta)
        for name in NAMES
        for case in cases(name)
        for beta in (20, 3)
        if WINDOW < case[1] < case[0]
    ]


def _pyramid(checkout: Path, name: str, prompt: int, budget: int, beta: int) -> Recording:
    given, kept = states(name), []
    press = SimpleNamespace(window_size=WINDOW, kernel_size=5, beta=beta, compression_ratio=1 - budget / prompt)
    for method, file in (("score", "snapkv_press.py"), ("get_layer_budget", "pyramidkv_press.py")):
        setattr(press, method, partial(*methods(checkout, file, method), press))
    (compress,) = methods(checkout, "pyramidkv_press.py", "compress")
    heads, kv_heads = given.queries.shape[1], given.keys.shape[1]
    config = SimpleNamespace(num_hidden_layers=given.layers, num_attention_heads=heads, num_key_value_heads=kv_heads)
    for place in range(given.layers):
        queries, keys, values = given.layer(place, slice(0, prompt))
        module = SimpleNamespace(head_dim=keys.shape[-1], config=config, layer_idx=place)
        weights = attention(queries, keys).float()
        stays, _ = compress(press, module, torch.empty(1, prompt, 1), keys, values, weights, {})
        kept.append(kept_columns(stays[0], keys[0]))
    label = "pyramidkv, variant=kvpress" + (f", pyramid_beta={beta}" if beta != 20 else "")
    options = {"variant": "kvpress", "window_size": WINDOW, "pyramid_beta": float(beta)}
    return Recording(label, "pyramidkv", options, name, prompt, budget, torch.stack(kept))


if __name__ == "__main__":
    functions = (
        "presses/keydiff_press.py, cur_press.py: score; scorer_press.py: ScorerPress.compress; snapkv_press.py: score; "
        "pyramidkv_press.py: PyramidKVPress.compress, get_layer_budget"
    )
    run(recordings, "NVIDIA/kvpress", functions)
