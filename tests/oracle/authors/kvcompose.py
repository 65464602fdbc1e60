"""NVIDIA/kvpress, where an author of KVCompose has it (kvcompose_press.py). What is fed in the second reading has the
states of the first, on both sides."""

from pathlib import Path
from types import SimpleNamespace

import torch

from . import presses
from .recording import Recording
from .script import Recordings, prompts, run
from .states import States, states

UNSTRUCTURED = {"layer_budget": "global", "head_budget": "adaptive", "safeguard": 0.0}
TIES = "a layer keeps one entry at least; of composite tokens that score alike, as the first layer's, top-k takes any"
ONE = "a layer keeps one entry at least"
DIFFERENCES = {"kvcompose/": (0.91, TIES), "kvcompose, unstructured/": (0.95, ONE)}


def recordings(checkout: Path) -> Recordings:
    theirs = presses.load(checkout, "kvcompose")["KVComposePress"]
    for name, prompt, budget in prompts():
        if budget >= prompt:
            continue  # a ratio cannot be negative
        for label, structured, options in (("kvcompose", True, {}), ("kvcompose, unstructured", False, UNSTRUCTURED)):
            press = theirs(structured=structured)
            presses.set_size(press, prompt, budget)
            yield Recording(label, "kvcompose", options, name, prompt, budget, _kept(press, states(name), prompt))


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
    run(recordings, "NVIDIA/kvpress", "presses/kvcompose_press.py: KVComposePress")
