"""NVIDIA/kvpress, key_rerotation_press.py over its knorm_press.py, and finch_press.py with its keys rotated anew."""

from pathlib import Path

import torch

from . import presses
from .recording import Recording
from .script import Recordings, run
from .states import cases, states

STATES = ("random_gqa", "smollm2")
DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    theirs = presses.load(checkout, "key_rerotation", "knorm", "finch")
    rerotation, knorm, finch = (theirs[f"{name}Press"] for name in ("KeyRerotation", "Knorm", "Finch"))
    to_index = rerotation._rerotate_cos_sin

    def to_the_end(keys: torch.Tensor, inv_freq: torch.Tensor, indices: torch.Tensor):
        # They rotate each key to its index. Attention knows differences alone: here all are moved by what was evicted,
        # so that the last token stands where it truly is.
        rerotation.indices = indices[0]
        return to_index(keys, inv_freq, indices - (rerotation.length - indices.shape[-1]))

    rerotation._rerotate_cos_sin = staticmethod(to_the_end)

    def keep(press: object, name: str, place: int, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
        rerotation.length = prompt
        moved, _ = presses.compress(press, states(name), place, prompt)
        kept = torch.zeros(len(moved), prompt, dtype=torch.bool).scatter(1, rerotation.indices, True)
        return kept, moved

    for name in STATES:
        prompt, budget = cases(name)[2]
        for label, options in (("knorm", {}), ("finch", {"window_size": 8})):
            press = rerotation(knorm()) if label == "knorm" else finch()
            presses.set_size(press, prompt, budget)
            press.window_size = 8
            kept, keys = zip(*(keep(press, name, place, prompt) for place in range(states(name).layers)), strict=True)
            options = {**options, "positions": "cache"}
            given = (label, options, name, prompt, budget, torch.stack(kept))
            yield Recording(f"{label}, positions=cache", *given, keys=torch.stack(keys))


if __name__ == "__main__":
    run(recordings, "NVIDIA/kvpress", "presses: KeyRerotationPress, FinchPress")
