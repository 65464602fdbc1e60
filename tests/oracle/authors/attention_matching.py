"""adamzweiger/compaction: the most attended keys, with fitted biases and values; the prompt's own queries ask."""

import math
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording
from .released import definitions
from .script import Recordings, run
from .states import NAMES, cases, states

FOLDER, CLASS = "compaction/algorithms", "HighestAttentionKeysCompaction"
SETTINGS = {  # of evaluation/configs/algorithms/default.py; options of ours -> of theirs
    "attention-matching": ({}, {}),
    "attention-matching, bias=none": ({"bias": "none"}, {"beta_method": "zero"}),
    "attention-matching, values=own": ({"values": "own"}, {"c2_method": "direct"}),
}
WITH_STATES = "random_gqa"  # of text, the values of some keys are left to rounding: they differ by up to 0.002

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    # In double precision, since single leaves the least-squares problems of few tokens open.
    double = SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    given = {"torch": double, "ABC": ABC, "abstractmethod": abstractmethod, "Tuple": tuple, "Dict": dict}
    # Three power iterations from a random vector are made a hundred, which find the norm.
    base = definitions(checkout / FOLDER / "base.py", "CompactionAlgorithm", constants={3: 100}, **given)
    theirs = definitions(checkout / FOLDER / "highest_attention_keys.py", CLASS, **base)[CLASS]

    def recording(label: str, name: str, prompt: int, budget: int, with_states: bool) -> Recording:
        options, their_options = SETTINGS[label]
        known, kept, stored = states(name), [], ([], [])
        bounds = {"nnls_iters": 2, "nnls_lower_bound": math.exp(-3), "nnls_upper_bound": math.exp(3)}
        algorithm = theirs(score_method="rms", **bounds, **their_options)
        for place in range(known.layers):
            queries, keys, values = (part[0].double() for part in known.layer(place, slice(0, prompt)))
            asked = queries.reshape(len(keys), -1, queries.shape[-1])
            stays = torch.zeros(keys.shape[:2], dtype=torch.bool)
            of_layer = ([], [])
            for head, of_head in enumerate(zip(keys, values, asked, strict=True)):
                found, bias, fitted, columns = algorithm.compute_compacted_cache(*of_head, budget)
                order = torch.tensor(columns).argsort()
                stays[head, columns] = True
                of_layer[0].append(torch.cat([found, bias[:, None]], 1)[order].float())
                of_layer[1].append(fitted[order].float())
            kept.append(stays)
            for to, part in zip(stored, of_layer, strict=True):
                to.append(torch.stack(part))
        matched = {"keys": torch.stack(stored[0]), "values": torch.stack(stored[1])} if with_states else {}
        return Recording(label, "attention-matching", options, name, prompt, budget, torch.stack(kept), **matched)

    yield from [
        recording(label, name, prompt, budget, with_states=name == WITH_STATES and budget <= 10)
        for label in SETTINGS
        for name in NAMES
        for prompt, budget in cases(name)
        if budget < prompt
    ]


if __name__ == "__main__":
    functions = f"{FOLDER}: {CLASS}.compute_compacted_cache"
    run(recordings, "adamzweiger/compaction", functions)
