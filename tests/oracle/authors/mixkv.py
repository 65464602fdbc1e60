"""xuyang-liu16/MixKV: over SnapKV, as its scripts (`headwisemixkv`), with the heads' weights found for each prompt, and
from a file of the form that they read."""

import json
import os
import tempfile
from pathlib import Path

import torch

from .recording import Recording, kept_columns
from .released import definitions
from .script import Recordings, run
from .states import NAMES, cases, states

FILE = "mixkv/mixkv_utils.py"
CLASS = "SnapKVCluster"
WEIGHTS = Path("visual_head/head_score/qwen_kv_similarity.json")
KNOWN = "mixkv, calibration="
WINDOWS = {"mixkv": 32, "mixkv, window=8": 8, KNOWN: 8}

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    torch.compiler.set_stance("force_eager")
    theirs = definitions(checkout / FILE, CLASS, "repeat_kv", load_similarity_score=lambda: None)[CLASS]
    loaded = definitions(checkout / FILE, "load_similarity_score", json=json)["load_similarity_score"]

    def recording(label: str, name: str, prompt: int, budget: int, window: int) -> Recording:
        """Their weights come from a file, of a data set's samples: without it from their function for it, of this
        prompt; the file's are drawn."""
        given, kept, known = states(name), [], {}
        if label == KNOWN:
            drawn = torch.rand(2, given.layers, given.keys.shape[1], generator=torch.Generator().manual_seed(0))
            samples = {
                f"{layer}-{head}-{part}": drawn[:, layer, head].tolist()
                for layer in range(given.layers)
                for head in range(given.keys.shape[1])
                for part in ("key", "value")
            }
            WEIGHTS.write_text(json.dumps(samples))
            known = {"weights": loaded()}
        for place in range(given.layers):
            queries, keys, values = given.layer(place, slice(0, prompt))
            cluster = theirs(
                window_size=window, max_capacity_prompt=budget, layer_idx=0, num_key_value_groups=given.groups,
                select_method="headwisemixkv",
            )  # fmt: skip
            if known:
                cluster.key_score = known["weights"][place : place + 1]
            else:
                cluster.key_score = cluster.calcul_similarity_score(keys)[1].squeeze(-1)
            kept.append(kept_columns(cluster.update_kv(keys, queries, values)[0][0], keys[0]))
        options = {} if label == "mixkv" else {"window_size": window}
        return Recording(label, "mixkv", options, name, prompt, budget, torch.stack(kept), known=known)

    with tempfile.TemporaryDirectory() as folder:  # the file's place is fixed
        os.chdir(folder)
        WEIGHTS.parent.mkdir(parents=True)
        yield from [
            recording(label, name, prompt, budget, window)
            for label, window in WINDOWS.items()
            for name in NAMES
            for prompt, budget in cases(name)
            if budget > window  # they assert
        ]


if __name__ == "__main__":
    run(recordings, "xuyang-liu16/MixKV", f"{FILE}: {CLASS}, load_similarity_score")
