"""NVIDIA/kvpress, cap_press.py: CapKV has its home there."""

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
    utils.get_prerope_query_states = lambda module, hidden: module.queries[:, :, hidden[0, :, 0]]
    theirs = import_module("kvpress.presses.cap_press").CapPress

    def keep(press: object, name: str, place: int, prompt: int) -> torch.Tensor:
        given, tokens = states(name), slice(0, prompt)
        queries, keys, values = given.layer(place, tokens)

        def rotation(_, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = (positions[..., None] * given.inv_freq).repeat(1, 1, 2)
            return angles.cos(), angles.sin()

        module = SimpleNamespace(
            config=SimpleNamespace(num_attention_heads=queries.shape[1]),
            head_dim=keys.shape[-1],
            queries=given.rotary(tokens).unrotated(queries),
            rotary_emb=rotation,
        )
        hidden = torch.arange(prompt)[None, :, None]  # tokens by their number
        stays, _ = press.compress(module, hidden, keys, values, None, {})
        return kept_columns(stays[0], keys[0])

    recordings = []
    for name in NAMES:
        for prompt, budget in cases(name):
            if budget >= prompt:
                continue  # a ratio cannot be negative
            for label, options in (("capkv", {}), ("capkv, tau=20", {"tau": 20.0})):
                press = theirs(compression_ratio=1 - (budget + 1e-3) / prompt, **options)
                kept = torch.stack([keep(press, name, place, prompt) for place in range(states(name).layers)])
                recordings.append(Recording(label, "capkv", options, name, prompt, budget, kept))
    save("capkv", recordings, "NVIDIA/kvpress", checkout, "presses/cap_press.py: CapPress")


if __name__ == "__main__":
    main()
