"""MGDDestiny/Lava, `gqa_support` on as in its scripts. Layers' sizes are made by the loop in its models' forward pass,
written again here; that loop means to give each layer its own floor for the heads, and misspells it."""

from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording, kept_columns
from .released import definitions, repeat_kv
from .script import Recordings, prompts, run
from .states import states

FLOOR = (
    "a misspelt name leaves every layer the same floor for its heads, a fifth of the budget with the window in it, so "
    "that a head holds up to a fifth of the window more than was asked for"
)
ROUNDED = "it rounds each layer's and each head's part, and a layer that would be full keeps the rest to itself"
DIFFERENCES = {"lava/": (0.87, FLOOR), "lava, each layer's floor": (0.91, ROUNDED)}


def recordings(checkout: Path) -> Recordings:
    utils = checkout / "adaptive_snapkv/monkeypatch/snapkv_utils.py"
    stand_ins = {
        "repeat_kv": repeat_kv,
        "warnings": SimpleNamespace(warn=lambda message: None),  # of a model without groups
    }
    theirs = definitions(utils, "LavaKVCluster", **stand_ins)["LavaKVCluster"]

    def keep(name: str, prompt: int, budget: int, window: int, own_floor: bool, pooling: str) -> torch.Tensor:
        given = states(name)
        clusters = []
        for place in range(given.layers):
            queries, keys, values = given.layer(place, slice(0, prompt))
            cluster = theirs(
                window_size=window,
                pooling=f"{pooling}pool",
                base_capacity=budget,
                floor_alpha=0.2,
                skip=0,
                layer_idx=place,
                gqa_support=True,
                num_key_value_groups=given.groups,
            )
            cluster.store(keys, queries, values, *cluster.calcul_attn_score(keys, queries, values))
            clusters.append(cluster)
            sizes = [one.sparsity.item() for one in clusters]
            for one, size in zip(clusters, sizes, strict=True):
                one.base_capacity = int(size / sum(sizes) * (budget - window) * given.layers)
                if own_floor:
                    one.floor_capacity = int(one.base_capacity * one.floor_ratio)
                (one.re_update_kv_gqa if one.need_re else one.update_kv_gqa)()
        kept = []
        for place, cluster in enumerate(clusters):
            among = given.keys[place, :, :prompt]
            heads = cluster.key_states if isinstance(cluster.key_states, list) else cluster.key_states[0]
            kept.append(torch.cat([kept_columns(h[None], a[None]) for h, a in zip(heads, among, strict=True)]))
        return torch.stack(kept)

    for name, prompt, budget in prompts():
        for label, window, own_floor, pooling in (
            ("lava", 32, False, "max"),
            ("lava, each layer's floor", 32, True, "max"),
            ("lava, each layer's floor, window_size=8", 8, True, "max"),
            ("lava, each layer's floor, window_size=8, pooling=avg", 8, True, "avg"),
        ):
            if budget <= window or budget >= prompt:
                continue
            kept = keep(name, prompt, budget, window, own_floor, pooling)
            options = {"window_size": window} | ({"pooling": "avg"} if pooling == "avg" else {})
            yield Recording(label, "lava", options, name, prompt, budget, kept)


if __name__ == "__main__":
    functions = "adaptive_snapkv/monkeypatch/snapkv_utils.py: LavaKVCluster"
    run(recordings, "MGDDestiny/Lava", functions)
