"""WeianMao/triattention: the scores of pruning_utils.py and the choice of triattention.py in which every layer and KV
head chooses by itself (`per_layer_perhead_pruning`), the prompt included. Each of the states is calibrated on its own
prompt."""

from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import torch

from .recording import Recording
from .released import definitions
from .script import Recordings, run
from .states import NAMES, States, cases, states

UTILS, CLASS = "triattention/methods/pruning_utils.py", "triattention/methods/triattention.py"
FUNCTIONS = ("rotate_half", "invert_rope", "to_complex_pairs", "build_geometric_offsets", "score_keys_for_round")
FUNCTIONS += ("compute_frequency_statistics_from_means",)
LABELS = {"triattention": {}, "triattention, group=mean": {"group": "mean"}}
LABELS["triattention, farthest=64"] = {"farthest": 64}

ROUNDING = "angles of positions 65,536 ahead are rounded to fp32, there with the key's, here without: a near tie"
DIFFERENCES: dict[str, tuple[float, str]] = {
    "triattention/random_mha": (0.99, ROUNDING),
    "triattention, group=mean/random_mha": (0.99, ROUNDING),
    "triattention, group=mean/smollm2": (0.99, ROUNDING),
}


def recordings(checkout: Path) -> Recordings:
    utils = definitions(checkout / UTILS, *FUNCTIONS)
    theirs = definitions(checkout / CLASS, "TriAttention", Optional=Optional, **{k: utils[k] for k in FUNCTIONS})
    for name in NAMES:
        given = states(name)
        stats = statistics(given, utils)
        mean = torch.cat([stats.mean.real, stats.mean.imag], -1)
        for prompt, budget in cases(name):
            for label, options in LABELS.items():
                if budget >= prompt:
                    continue
                compressor = made(theirs["TriAttention"], given, stats, utils, prompt, budget, options)
                entries = tuple(given.layer(place, slice(0, prompt))[1:] for place in range(given.layers))
                indices = compressor.compute_keep_indices(entries)  # (layers, kv_heads, budget)
                kept = torch.zeros(*indices.shape[:2], prompt, dtype=torch.bool).scatter(2, indices, True)
                known = {"mean": mean, "norms": stats.norms}
                yield Recording(label, "triattention", options, name, prompt, budget, kept, known=known)


def statistics(given: States, utils: dict) -> SimpleNamespace:
    """As scripts/calibrate.py: mean complex (layers, heads, pairs), and the mean of the absolute values."""
    prompt = slice(0, given.prompt)
    before = utils["invert_rope"](given.queries[:, :, prompt], given.cos[prompt], given.sin[prompt], 1.0)
    pairs = torch.complex(*before.float().chunk(2, dim=-1))
    return SimpleNamespace(mean=pairs.mean(2), norms=pairs.abs().mean(2))


def made(cls: type, given: States, stats: SimpleNamespace, utils: dict, prompt: int, budget: int, options: dict):
    """Their compressor of these states, without their model and its files."""

    def rotary(_: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (positions[..., None] * given.inv_freq.float()).repeat(1, 1, 2)  # in fp32, as theirs
        return angles.cos(), angles.sin()

    layers, heads, head_dim = given.layers, given.queries.shape[1], given.queries.shape[3]
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    this = cls.__new__(cls)
    this.config = SimpleNamespace(
        device=torch.device("cpu"), dtype=torch.float32, layer_perhead_aggregation=options.get("group", "max")
    )
    this.budget, this.head_dim, this.rotary, this.rope_style, this.attention_scale = (
        budget, head_dim, rotary, "half", 1.0,
    )  # fmt: skip
    this.sampled_heads = every
    this.head_stats = {
        (layer, head): SimpleNamespace(q_mean_complex=stats.mean[layer, head], q_abs_mean=stats.norms[layer, head])
        for layer, head in every
    }
    this.omega = given.inv_freq.float()
    this.offsets = utils["build_geometric_offsets"](options.get("farthest", 65536), this.config.device)
    this.freq_scale_sq = torch.ones(head_dim // 2)
    this.num_attention_heads, this.num_key_value_heads = heads, given.keys.shape[1]
    this.num_key_value_groups = given.groups
    this.cache_positions, this.absolute_position = list(range(prompt)), prompt
    this.cache_positions_per_head = this.cache_positions_per_layer_perhead = this.generator = None
    this.score_aggregation, this.normalize_scores, this.disable_mlr, this.disable_trig = "mean", True, False, False
    this.per_head_pruning, this.per_layer_perhead_pruning, this.allow_prefill_compression = False, True, True
    return this


if __name__ == "__main__":
    functions = f"{UTILS}: {', '.join(FUNCTIONS)}; {CLASS}: TriAttention.compute_keep_indices"
    run(recordings, "WeianMao/triattention", functions)
