"""Zefan-Cai/KVCache-Factory (PyramidKV's authors): its clusters in the layout of one entry per KV head. They assert
that a budget exceeds the window."""

import sys
from itertools import product
from pathlib import Path

import torch

from .recording import Recording, kept_columns
from .script import Recordings, run
from .states import NAMES, cases, states

CLASSES = {"window_size": 32, "kernel_size": 5, "pooling": "avgpool"}  # init_snapkv's, init_pyramidkv's
LONGBENCH = {"window_size": 8, "kernel_size": 7, "pooling": "maxpool"}  # run_longbench.py's
SNAPKV = {"window_size": 32, "kernel_size": 7, "pooling": "maxpool"}  # SnapKV's own ablation_c*_w32_k7_maxpool.json
SETTINGS = {"": CLASSES, "longbench": LONGBENCH, "paper": SNAPKV}  # by our preset

STEPS = "each layer's step is rounded down, so that layers hold up to 1.5 entries more in the mean; our sum is exact"
NORMALIZED = "its AdaKV weighs a head by the part of its scores that its best hold, which AdaKV's authors do not"
DIFFERENCES = {
    "pyramidkv": (0.98, STEPS),
    "pyramidkv, preset=longbench": (0.93, STEPS),
    "adakv": (0.9, NORMALIZED),
}


def recordings(checkout: Path) -> Recordings:
    sys.path.insert(0, str(checkout / "pyramidkv"))
    import pyramidkv_utils as theirs

    def kept(cluster, name: str, place: int, prompt: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values (kv_heads, entries, head_dim), in the order of their columns, and which columns."""
        given = states(name)
        queries, keys, values = given.layer(place, slice(0, prompt))
        merge, cluster.merge = cluster.merge, None
        unmerged = cluster.update_kv(keys, queries, values, None, given.groups)[0][0]
        cluster.merge = merge
        stored = [x[0] for x in cluster.update_kv(keys, queries, values, None, given.groups)]
        column = (unmerged[:, :, None] == keys[0][:, None]).all(-1).int().argmax(-1)
        order = column.argsort(-1)[..., None].expand_as(unmerged)
        return *(x.gather(1, order) for x in stored), kept_columns(unmerged, keys[0])

    def recording(label: str, name: str, prompt: int, budget: int, settings: dict, options: dict) -> Recording:
        method, layers, merge = label.split(",")[0], states(name).layers, options.get("merge")
        given = {**settings, "max_capacity_prompt": budget, "merge": merge}
        found = []
        for place in range(layers):
            if method == "snapkv":
                cluster = theirs.SnapKVCluster(**given)
            else:
                cluster = theirs.PyramidKVCluster(layers, **given, layer_idx=place)
            found.append(kept(cluster, name, place, prompt))
        rows = torch.stack([layer[2] for layer in found])
        if merge is None:
            return Recording(label, method, options, name, prompt, budget, rows)
        keys, values = (torch.stack([layer[part] for layer in found]) for part in (0, 1))
        return Recording(label, method, options, name, prompt, budget, rows, keys=keys, values=values)

    def adaptive(name: str, prompt: int, budget: int) -> Recording:
        given, rows = states(name), []
        for place in range(given.layers):
            queries, keys, values = given.layer(place, slice(0, prompt))
            cluster = theirs.AdaKVCluster(**LONGBENCH, max_capacity_prompt=budget, floor=0.2, normalize=True)
            flat, _ = cluster.update_kv(keys, queries, values)
            rows.append(kept_columns(flat.split(cluster.head_lens.tolist()), keys[0]))
        options = {"preset": "longbench"}
        return Recording("adakv, preset=longbench", "adakv", options, name, prompt, budget, torch.stack(rows))

    runs = [("snapkv", preset) for preset in SETTINGS] + [("pyramidkv", preset) for preset in ("", "longbench")]
    for name in NAMES:
        for (prompt, budget), (method, preset) in product(cases(name), runs):
            if budget > SETTINGS[preset]["window_size"]:
                label, options = (f"{method}, preset={preset}", {"preset": preset}) if preset else (method, {})
                yield recording(label, name, prompt, budget, SETTINGS[preset], options)
        yield from [adaptive(name, *case) for case in cases(name) if case[1] > LONGBENCH["window_size"]]
    for name, prompt, budget in (("random_gqa", 100, 20), ("random_mha", 60, 12)):
        settings = {**CLASSES, "window_size": 8}  # with max pooling there are ties
        options = {"window_size": 8, "merge": "pivot"}
        yield recording("snapkv, merge=pivot", name, prompt, budget, settings, options)


if __name__ == "__main__":
    functions = "pyramidkv/pyramidkv_utils.py: SnapKVCluster, PyramidKVCluster, AdaKVCluster (update_kv, merge_kv)"
    run(recordings, "Zefan-Cai/KVCache-Factory", functions)
