"""NVIDIA/kvpress, finch_press.py: the question is a window of 32 tokens, keys stay as they are rotated."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from .recording import Recording, kept_columns, save
from .states import NAMES, cases, states

DIFFERENCES: dict[str, tuple[float, str]] = {}


def main() -> None:
    checkout = Path(sys.argv[1])
    for name in ("kvpress", "kvpress.presses"):  # its own __init__ wants other libraries
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(checkout / name.replace(".", "/"))]
    utils = sys.modules["kvpress.utils"] = ModuleType("kvpress.utils")
    utils.extract_keys_and_values = None
    utils.get_prerope_query_states = lambda module, hidden: module.queries[:, :, -hidden.shape[1] :]
    theirs = import_module("kvpress.presses.finch_press").FinchPress

    def keep(press: object, name: str, place: int, prompt: int) -> torch.Tensor:
        given = states(name)
        queries, keys, values = given.layer(place, slice(0, prompt))
        module = SimpleNamespace(
            config=SimpleNamespace(num_attention_heads=queries.shape[1], num_key_value_heads=keys.shape[1]),
            head_dim=keys.shape[-1],
            num_key_value_groups=given.groups,
            queries=queries,  # rotated already: they are given cos 1 and sin 0
        )
        rotation = (torch.ones(1, prompt, 1), torch.zeros(1, prompt, 1))
        hidden = torch.empty(1, prompt, 1)
        stays, _ = press.compress(module, hidden, keys, values, None, {"position_embeddings": rotation})
        return kept_columns(stays[0], keys[0])

    recordings = []
    for name in NAMES:
        for prompt, budget in cases(name):
            for label, options in (
                ("finch", {}),
                ("finch, window_size=8", {"window_size": 8}),
                ("finch, window_size=8, normalize=False", {"window_size": 8, "normalize": False}),
            ):
                window = options.get("window_size", 32)
                if not window < budget < prompt:
                    continue
                press = theirs(
                    compression_ratio=1 - (budget + 1e-3) / prompt,
                    normalize_scores=options.get("normalize", True),
                    rerotate_keys=False,
                )
                press.window_size = window
                kept = torch.stack([keep(press, name, place, prompt) for place in range(states(name).layers)])
                recordings.append(Recording(label, "finch", options, name, prompt, budget, kept))
    save("finch", recordings, "NVIDIA/kvpress", checkout, "presses/finch_press.py: FinchPress")


if __name__ == "__main__":
    main()
