"""NVIDIA/kvpress: DuoAttention's choice of heads and what they keep (duo_attention_press.py), and expected attention
with statistics from elsewhere (expected_attention_with_stats.py), its home.

DuoAttention keeps a number of heads there, a number of entries here: recorded are budgets that some heads fill exactly.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from .presses import methods, rotary_emb
from .recording import Recording, kept_columns
from .script import Recordings, run
from .states import NAMES, cases, states

SINKS, RECENT = 4, 16
SMALL = ("random_gqa", "random_mha", "tiny")  # states whose covariances are a small file
STREAMING = (0.25, 0.5, 0.75)  # of all heads

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    for name in NAMES:
        yield from duo(checkout, name)
    for name in SMALL:
        yield from with_statistics(checkout, name)


def duo(checkout: Path, name: str) -> Recordings:
    given, prompt = states(name), states(name).prompt
    layers, kv_heads = given.keys.shape[:2]
    gates = np.random.Generator(np.random.PCG64(0)).random((layers, kv_heads))
    start, compress = methods(checkout, "duo_attention_press.py", "post_init_from_model", "compress")
    for share in STREAMING:
        press = SimpleNamespace(head_compression_ratio=share, on_the_fly_scoring=False)
        press.load_attention_pattern = lambda model: (SINKS, RECENT, gates)
        start(press, SimpleNamespace(device="cpu"))
        kept = torch.ones(layers, kv_heads, prompt, dtype=torch.bool)
        for place in range(layers):
            _, keys, values = given.layer(place, slice(0, prompt))
            config = SimpleNamespace(_attn_implementation="sdpa")
            module = SimpleNamespace(config=config, layer_idx=place, masked_key_indices=None)
            compress(press, module, None, keys, values, None, {})
            _, head, column = module.masked_key_indices
            kept[place, head, column] = False
        entries = int(kept.sum())
        budget = entries // (layers * kv_heads)
        if budget * layers * kv_heads != entries or kept.sum((1, 2)).remainder(kv_heads).any():
            continue  # no budget is the same
        options = {"sinks": SINKS, "recent": RECENT}
        known = {"gates": torch.from_numpy(gates).float()}
        yield Recording("duoattention", "duoattention", options, name, prompt, budget, kept, known=known)


def with_statistics(checkout: Path, name: str) -> Recordings:
    """The statistics are those of the states' prompt before RoPE, without its first 4 tokens."""
    given = states(name)
    before = given.rotary(slice(0, given.prompt)).unrotated(given.queries[:, :, : given.prompt])[:, :, 4:]
    mean = before.mean(2)
    centred = before - mean[:, :, None]
    covariance = centred.mT @ centred / (before.shape[2] - 1)
    (statistics,) = methods(checkout, "expected_attention_with_stats.py", "get_query_statistics")
    ahead, score = methods(checkout, "expected_attention_press.py", "apply_avg_rope", "score")
    (compress,) = methods(checkout, "scorer_press.py", "compress")
    press = SimpleNamespace(n_sink=4, n_future_positions=512, use_covariance=True, use_vnorm=True, epsilon=0.0)
    press.mu, press.cov = mean, covariance
    press.apply_avg_rope = lambda *arguments: ahead(press, *arguments)
    press.get_query_statistics = lambda *arguments: statistics(press, *arguments)
    press.score = lambda *arguments: score(press, *arguments)
    for prompt, budget in cases(name):
        if budget >= prompt:
            continue
        press.compression_ratio, kept = 1 - (budget + 0.5) / prompt, []
        for place in range(given.layers):
            _, keys, values = given.layer(place, slice(0, prompt))
            module = SimpleNamespace(layer_idx=place, head_dim=keys.shape[-1], rotary_emb=rotary_emb(given))
            module.config = SimpleNamespace(num_attention_heads=given.queries.shape[1])
            stays, _ = compress(press, module, torch.empty(1, prompt, 1), keys, values, None, {})
            kept.append(kept_columns(stays[0], keys[0]))
        known = {"mean": mean, "covariance": covariance}
        label = "expected-attention, calibration="
        yield Recording(label, "expected-attention", {}, name, prompt, budget, torch.stack(kept), known=known)


if __name__ == "__main__":
    functions = "DuoAttentionPress.post_init_from_model, compress; ExpectedAttentionStatsPress.get_query_statistics; "
    functions += "ExpectedAttentionPress.apply_avg_rope, score; ScorerPress.compress"
    run(recordings, "NVIDIA/kvpress", functions)
