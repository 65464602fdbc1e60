"""FasterDecoding/SnapKV: its cluster repeats KV heads of several query heads, and each query head keeps its own. So it
is held against ours where every head has its own keys; KVCache-Factory has the same cluster for KV heads. It asserts
that a budget exceeds the window."""

import sys
from pathlib import Path

import torch

from .recording import Recording, kept_columns
from .script import Recordings, run
from .states import cases, states

STATES = "random_mha"
SETTINGS = {"": ("avgpool", 5), "paper": ("maxpool", 7)}  # init_snapkv's, and those of its experiments/LongBench

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    sys.path.insert(0, str(checkout / "snapkv" / "monkeypatch"))
    import snapkv_utils as theirs

    given = states(STATES)
    for preset, (pooling, kernel) in SETTINGS.items():
        for prompt, budget in cases(STATES):
            if budget <= 32:
                continue
            kept = []
            for place in range(given.layers):
                queries, keys, values = given.layer(place, slice(0, prompt))
                cluster = theirs.SnapKVCluster(32, budget, kernel, pooling)
                stays, _ = cluster.update_kv(keys, queries, values, None, given.groups)
                kept.append(kept_columns(stays[0], keys[0]))
            options = {"preset": preset} if preset else {}
            label = f"snapkv, its own repository{', preset=' if preset else ''}{preset}"
            yield Recording(label, "snapkv", options, STATES, prompt, budget, torch.stack(kept))


if __name__ == "__main__":
    functions = "snapkv/monkeypatch/snapkv_utils.py: SnapKVCluster.update_kv"
    run(recordings, "FasterDecoding/SnapKV", functions)
