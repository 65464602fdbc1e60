"""Zefan-Cai/KVCache-Factory (PyramidKV's authors): its clusters in the layout of one entry per KV head."""

import sys
from itertools import product
from pathlib import Path

import torch

from .recording import Recording, kept_columns, save
from .states import NAMES, cases, states

# window, kernel, pooling: run_longbench.py's, and the classes' own.
LONGBENCH, CLASSES = (8, 7, "maxpool"), (32, 5, "avgpool")

DIFFERENCES: dict[str, tuple[float, str]] = {}


def main() -> None:
    checkout = Path(sys.argv[1])
    sys.path.insert(0, str(checkout / "pyramidkv"))
    import pyramidkv_utils as theirs

    def recording(name: str, label: str, method: str, prompt: int, budget: int, options: dict, make) -> Recording:
        given, kept = states(name), []
        for place in range(given.layers):
            queries, keys, values = given.layer(place, slice(0, prompt))
            cluster = make(place, given.layers)
            stays, _ = cluster.update_kv(keys, queries, values, None, given.groups)
            kept.append(kept_columns(stays[0], keys[0]))
        return Recording(label, method, options, name, prompt, budget, torch.stack(kept))

    recordings = []
    for name in NAMES:
        for (prompt, budget), (window, kernel, pooling) in product(cases(name), (LONGBENCH, CLASSES)):
            settings = {"window_size": window, "kernel_size": kernel, "pooling": pooling}
            options = {**settings, "pooling": pooling.removesuffix("pool")}
            if budget <= window:
                continue  # they assert

            def snap(place: int, layers: int, settings=settings, budget=budget):
                return theirs.SnapKVCluster(**settings, max_capacity_prompt=budget)

            def pyramid(place: int, layers: int, settings=settings, budget=budget):
                return theirs.PyramidKVCluster(layers, **settings, max_capacity_prompt=budget, layer_idx=place)

            how = f"window={window}, {options['pooling']}"
            recordings.append(recording(name, f"snapkv, {how}", "snapkv", prompt, budget, options, snap))
            recordings.append(recording(name, f"pyramidkv, {how}", "pyramidkv", prompt, budget, options, pyramid))
    save("kvcache_factory", recordings, "Zefan-Cai/KVCache-Factory", checkout, "pyramidkv/pyramidkv_utils.py: ...")


if __name__ == "__main__":
    main()
