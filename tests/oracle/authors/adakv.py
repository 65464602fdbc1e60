"""FFY0/AdaKV: its adaptive cluster for KV heads of several query heads (gqa_support, gqa_func mean), window 32, max
pooling over 7, floor_alpha 0.2 as in experiments/LongBench/pred.py. Budgets below the window fail in it."""

import sys
from pathlib import Path
from types import ModuleType

import torch

from .recording import Recording, kept_columns
from .script import Recordings, prompts, run
from .states import states

DIFFERENCES = {
    "adakv": (
        0.975,
        "it rounds each head's part, and the even share down, up to an entry away from our exact sum",
    )
}


def recordings(checkout: Path) -> Recordings:
    sys.path.insert(0, str(checkout / "adaptive_snapkv" / "monkeypatch"))
    sys.modules["flash_attn"] = ModuleType("flash_attn")
    sys.modules["flash_attn"].flash_attn_func = None
    import snapkv_utils as theirs

    for name, prompt, budget in prompts():
        for floor, pyramid in ((0.2, False), (0.5, False), (0.2, True)):
            if budget <= 32 or (budget > prompt and pyramid):
                continue
            given, kept = states(name), []
            for place in range(given.layers):
                queries, keys, values = given.layer(place, slice(0, prompt))
                cluster = theirs.AdaptiveSnapKVCluster(
                    base_capacity=budget, floor_alpha=floor, skip=0, layer_idx=place, num_hidden_layers=given.layers,
                    pyram_mode=pyramid, gqa_support=True, num_key_value_groups=given.groups, gqa_func="mean",
                )  # fmt: skip
                flat, _ = cluster.update_kv(keys, queries, values)
                kept.append(kept_columns(flat.split(cluster.head_lens.tolist()), keys[0]))
            options = {"layer_budget": "pyramid"} if pyramid else {"safeguard": floor} if floor != 0.2 else {}
            label = ", ".join(["adakv", *(f"{key}={value}" for key, value in options.items())])
            yield Recording(label, "adakv", options, name, prompt, budget, torch.stack(kept))


if __name__ == "__main__":
    functions = "adaptive_snapkv/monkeypatch/snapkv_utils.py: AdaptiveSnapKVCluster.update_kv"
    run(recordings, "FFY0/AdaKV", functions)
