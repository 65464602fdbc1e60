"""CR400AF-A/SparseMM: the heads' capacities and what they keep, with scores that are drawn."""

from pathlib import Path

import numpy as np
import torch

from .recording import Recording, kept_columns
from .released import definitions
from .script import Recordings, run
from .states import NAMES, cases, states

FILE, CLASS = "sparsemm/sparsemm_utils.py", "SparseMM"
WINDOWS = {"sparsemm, window_size=8": 8, "sparsemm": 32}

ROUNDED = "there each head's capacity is rounded by itself, here so that the sum is exact"
LEFT = "there what a head has no keys for is lost, here others get it; and what differs by rounding"
DIFFERENCES: dict[str, tuple[float, str]] = {
    **{f"{label}/": (0.97, ROUNDED) for label in WINDOWS},
    **{f"{label}/random_mha": (0.86, LEFT) for label in WINDOWS},
}


def recordings(checkout: Path) -> Recordings:

    def recording(label: str, name: str, prompt: int, budget: int, window: int) -> Recording:
        given, kept = states(name), []
        layers, heads = given.queries.shape[:2]
        draw = np.random.Generator(np.random.PCG64(layers * heads))
        scores = draw.exponential(size=(layers, heads)).astype(np.float32)
        table = {f"{layer}-{head}": [float(scores[layer, head])] for layer in range(layers) for head in range(heads)}
        names = definitions(checkout / FILE, CLASS, "repeat_kv", load_head_score=lambda model_type: table)
        for place in range(layers):
            queries, keys, values = given.layer(place, slice(0, prompt))
            cluster = names[CLASS](
                window_size=window, kernel_size=5, pooling="avgpool", base_capacity=budget, ratio=0.1, layer_idx=place,
                num_hidden_layers=layers, head_score="visual", num_attention_heads=heads,
                num_key_value_groups=given.groups,
            )  # fmt: skip
            flat, _ = cluster.update_kv(keys, queries, values)
            entries = flat.split(cluster.head_lens.tolist())
            kept.append(torch.cat([kept_columns(e[None], k[None]) for e, k in zip(entries, keys[0], strict=True)]))
        options = {} if window == 32 else {"window_size": window}
        known = {"scores": torch.from_numpy(scores)}
        return Recording(label, "sparsemm", options, name, prompt, budget, torch.stack(kept), known=known)

    yield from [
        recording(label, name, prompt, budget, window)
        for label, window in WINDOWS.items()
        for name in NAMES
        for prompt, budget in cases(name)
        if window < budget < prompt
    ]


if __name__ == "__main__":
    run(recordings, "CR400AF-A/SparseMM", f"{FILE}: {CLASS}")
