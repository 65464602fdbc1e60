"""NVIDIA/kvpress, key_rerotation_press.py over its knorm_press.py, and finch_press.py with its keys rotated anew."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from .recording import Recording, save
from .states import cases, states

STATES = ("random_gqa", "smollm2")
DIFFERENCES: dict[str, tuple[float, str]] = {}


def main() -> None:
    checkout = Path(sys.argv[1])
    for name in ("kvpress", "kvpress.presses"):  # its own __init__ wants other libraries
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(checkout / name.replace(".", "/"))]
    utils = sys.modules["kvpress.utils"] = ModuleType("kvpress.utils")
    utils.extract_keys_and_values = None
    utils.get_prerope_query_states = lambda module, hidden: module.queries[:, :, -hidden.shape[1] :]
    rerotation = import_module("kvpress.presses.key_rerotation_press").KeyRerotationPress
    knorm = import_module("kvpress.presses.knorm_press").KnormPress
    finch = import_module("kvpress.presses.finch_press").FinchPress
    to_index = rerotation._rerotate_cos_sin

    def to_the_end(keys: torch.Tensor, inv_freq: torch.Tensor, indices: torch.Tensor):
        # They rotate each key to its index. Attention knows differences alone: here all are moved by what was evicted,
        # so that the last token stands where it truly is.
        rerotation.indices = indices[0]
        return to_index(keys, inv_freq, indices - (rerotation.length - indices.shape[-1]))

    rerotation._rerotate_cos_sin = staticmethod(to_the_end)

    def keep(press: object, name: str, place: int, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = states(name)
        queries, keys, values = given.layer(place, slice(0, prompt))
        module = SimpleNamespace(
            config=SimpleNamespace(num_attention_heads=queries.shape[1], num_key_value_heads=keys.shape[1]),
            head_dim=keys.shape[-1],
            num_key_value_groups=given.groups,
            queries=queries,  # rotated already: they are given cos 1 and sin 0
            rotary_emb=SimpleNamespace(inv_freq=given.inv_freq),
        )
        rotation = (torch.ones(1, prompt, 1), torch.zeros(1, prompt, 1))
        rerotation.length = prompt
        hidden = torch.empty(1, prompt, 1)
        moved, _ = press.compress(module, hidden, keys, values, None, {"position_embeddings": rotation})
        kept = torch.zeros(keys.shape[1], prompt, dtype=torch.bool).scatter(1, rerotation.indices, True)
        return kept, moved[0]

    recordings = []
    for name in STATES:
        prompt, budget = cases(name)[2]
        for label, options in (("knorm", {}), ("finch", {"window_size": 8})):
            press = rerotation(knorm()) if label == "knorm" else finch()
            press.compression_ratio = 1 - (budget + 1e-3) / prompt
            press.window_size = 8
            kept, keys = zip(*(keep(press, name, place, prompt) for place in range(states(name).layers)), strict=True)
            options = {**options, "positions": "cache"}
            given = (label, options, name, prompt, budget, torch.stack(kept))
            recordings.append(Recording(f"{label}, positions=cache", *given, keys=torch.stack(keys)))
    functions = "presses: KeyRerotationPress, FinchPress"
    save("key_rerotation", recordings, "NVIDIA/kvpress", checkout, functions)


if __name__ == "__main__":
    main()
