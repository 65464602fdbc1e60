"""NVIDIA/kvpress, pull request 285, dropkv_press.py: the authors of DropKV offer their code there."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from .recording import Recording, kept_columns, save
from .states import NAMES, cases, states

COMMIT = "7fb862554f556ef075dfac299509aa839cdca94c"  # of `git fetch origin pull/285/head`

DIFFERENCES = {"dropkv": (0.96, "their squared length is multiplied out, and large terms cancel in fp32")}


def main() -> None:
    checkout = Path(sys.argv[1])
    for name in ("kvpress", "kvpress.presses"):  # its own __init__ wants other libraries
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(checkout / name.replace(".", "/"))]
    sys.modules["kvpress.presses.scorer_press"] = SimpleNamespace(ScorerPress=Scorer)
    sys.modules["kvpress.utils"] = SimpleNamespace(
        compute_n_kept=lambda length, ratio: int(length * (1 - ratio)),
        get_prerope_query_states=lambda module, hidden: module.queries[:, :, -hidden.shape[1] :],
    )
    theirs = import_module("kvpress.presses.dropkv_press").DropKVPress

    def keep(press: object, name: str, place: int, prompt: int) -> torch.Tensor:
        queries, keys, values = states(name).layer(place, slice(0, prompt))
        head_dim = keys.shape[3]  # queries are rotated already: they are given cos 1 and sin 0
        rotation = (torch.ones(1, prompt, head_dim), torch.zeros(1, prompt, head_dim))
        hidden, module = torch.empty(1, prompt, 1), SimpleNamespace(queries=queries)
        stays, _ = press.compress(module, hidden, keys, values, None, {"position_embeddings": rotation})
        return kept_columns(stays[0], keys[0])

    recordings = []
    for name in NAMES:
        for prompt, budget in cases(name):
            for label, options in (("dropkv", {}), ("dropkv, window_size=8, kernel_size=1", SMALL)):
                if budget <= options.get("window_size", 32) or budget >= prompt:
                    continue
                press = theirs(compression_ratio=1 - (budget + 0.5) / prompt, **options)
                kept = torch.stack([keep(press, name, place, prompt) for place in range(states(name).layers)])
                recordings.append(Recording(label, "dropkv", options, name, prompt, budget, kept))
    save("dropkv", recordings, "NVIDIA/kvpress", checkout, "presses/dropkv_press.py: DropKVPress", COMMIT)


SMALL = {"window_size": 8, "kernel_size": 1}


class Scorer:
    def __post_init__(self) -> None:
        pass


if __name__ == "__main__":
    main()
