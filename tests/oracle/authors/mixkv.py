"""xuyang-liu16/MixKV: over SnapKV, as its scripts (`headwisemixkv`), with the heads' weights found for each prompt."""

import sys
from pathlib import Path

import torch

from .recording import Recording, kept_columns, save
from .released import definitions
from .states import NAMES, cases, states

FILE = "mixkv/mixkv_utils.py"
CLASS = "SnapKVCluster"
WINDOWS = {"mixkv": 32, "mixkv, window=8": 8}

DIFFERENCES: dict[str, tuple[float, str]] = {}


def main() -> None:
    checkout = Path(sys.argv[1])
    torch.compiler.set_stance("force_eager")
    theirs = definitions(checkout / FILE, CLASS, "repeat_kv", load_similarity_score=lambda: None)[CLASS]

    def recording(label: str, name: str, prompt: int, budget: int, window: int) -> Recording:
        """Their weights come from a file, of a data set's samples: here from their function for it, of this prompt."""
        given, kept = states(name), []
        for place in range(given.layers):
            queries, keys, values = given.layer(place, slice(0, prompt))
            cluster = theirs(
                window_size=window,
                max_capacity_prompt=budget,
                layer_idx=0,
                num_key_value_groups=given.groups,
                select_method="headwisemixkv",
            )
            cluster.key_score = cluster.calcul_similarity_score(keys)[1].squeeze(-1)
            kept.append(kept_columns(cluster.update_kv(keys, queries, values)[0][0], keys[0]))
        options = {} if label == "mixkv" else {"window_size": window}
        return Recording(label, "mixkv", options, name, prompt, budget, torch.stack(kept))

    recordings = [
        recording(label, name, prompt, budget, window)
        for label, window in WINDOWS.items()
        for name in NAMES
        for prompt, budget in cases(name)
        if budget > window  # they assert
    ]
    save("mixkv", recordings, "xuyang-liu16/MixKV", checkout, f"{FILE}: {CLASS}")


if __name__ == "__main__":
    main()
