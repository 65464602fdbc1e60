"""NVIDIA/kvpress, where an author of KVCompose has it (kvcompose_press.py). What is fed in the second reading has the
states of the first, on both sides."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from .recording import Recording, save
from .states import NAMES, States, cases, states

UNSTRUCTURED = {"layer_budget": "global", "head_budget": "adaptive", "safeguard": 0.0}
TIES = "a layer keeps one entry at least; of composite tokens that score alike, as the first layer's, top-k takes any"
ONE = "a layer keeps one entry at least"
DIFFERENCES = {"kvcompose/": (0.91, TIES), "kvcompose, unstructured/": (0.95, ONE)}


def main() -> None:
    checkout = Path(sys.argv[1])
    for name in ("kvpress", "kvpress.presses"):  # its own __init__ wants other libraries
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(checkout / name.replace(".", "/"))]
    utils = sys.modules["kvpress.utils"] = ModuleType("kvpress.utils")
    utils.extract_keys_and_values = None
    theirs = import_module("kvpress.presses.kvcompose_press").KVComposePress

    recordings = []
    for name in NAMES:
        for prompt, budget in cases(name):
            if budget >= prompt:
                continue  # a ratio cannot be negative
            for label, structured, options in (
                ("kvcompose", True, {}),
                ("kvcompose, unstructured", False, UNSTRUCTURED),
            ):
                press = theirs(compression_ratio=1 - (budget + 1e-3) / prompt, structured=structured)
                kept = _kept(press, states(name), prompt)
                recordings.append(Recording(label, "kvcompose", options, name, prompt, budget, kept))
    save("kvcompose", recordings, "NVIDIA/kvpress", checkout, "presses/kvcompose_press.py: KVComposePress")


def _kept(press: object, given: States, prompt: int) -> torch.Tensor:
    heads, kv_heads = given.queries.shape[1], given.keys.shape[1]
    config = SimpleNamespace(num_hidden_layers=given.layers, num_attention_heads=heads, num_key_value_heads=kv_heads)
    press._register_model(SimpleNamespace(config=config, parameters=lambda: iter([torch.empty(0)])))
    press.register_context_ids(torch.zeros(1, prompt))
    future = torch.ones(prompt, prompt, dtype=torch.bool).triu(1)
    for place in range(given.layers):
        queries, keys, _ = given.repeated().layer(place, slice(0, prompt))
        logits = queries @ torch.cat([keys, keys], 2).mT * keys.shape[-1] ** -0.5
        logits[..., prompt:].masked_fill_(future, -torch.inf)
        press.forward_hook(SimpleNamespace(layer_idx=place), [], {}, [None, logits.softmax(-1)])
    press.prepare_important_masks()
    return torch.stack([torch.stack(of_layer) for of_layer in press.important_mask_per_kv_head])


if __name__ == "__main__":
    main()
