"""NVIDIA/kvpress, where the authors of CriticalKV (criticalkv_press.py) and of ChunkKV (chunkkv_press.py) have their
code, both over its SnapKV. Chunks are whole there: the budget is what they hold."""

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from .recording import Recording, kept_columns, save
from .states import NAMES, cases, ratio_of, states

PRESSES = ("criticalkv", "chunkkv")
ADAPTIVE = {"head_budget": "adaptive-kvpress"}

DIFFERENCES: dict[str, tuple[float, str]] = {}


def main() -> None:
    checkout = Path(sys.argv[1])
    for name in ("kvpress", "kvpress.presses"):  # its own __init__ wants other libraries
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(checkout / name.replace(".", "/"))]
    utils = sys.modules["kvpress.utils"] = ModuleType("kvpress.utils")
    utils.get_prerope_query_states = lambda module, hidden: module.queries[:, :, -hidden.shape[1] :]
    utils.extract_keys_and_values = utils.get_prerope_key_states = None
    presses = {}
    for name in ("snapkv", "criticalkv", "chunkkv"):
        presses |= vars(import_module(f"kvpress.presses.{name}_press"))

    def keep(press, name: str, place: int, prompt: int) -> torch.Tensor:
        given = states(name)
        queries, keys, values = given.layer(place, slice(0, prompt))
        heads, kv_heads, head_dim = queries.shape[1], keys.shape[1], keys.shape[3]
        hidden = heads * head_dim
        module = SimpleNamespace(
            config=SimpleNamespace(
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=head_dim,
                hidden_size=hidden,
                _attn_implementation="sdpa",
            ),
            head_dim=head_dim,
            num_key_value_groups=given.groups,
            layer_idx=place,
            queries=queries,  # rotated already: they are given cos 1 and sin 0
            o_proj=SimpleNamespace(weight=given.o_proj[place]),
            masked_key_indices=None,
        )
        rotation = (torch.ones(1, prompt, head_dim), torch.zeros(1, prompt, head_dim))
        states_of = torch.empty(1, prompt, 1)
        stays, _ = press.compress(module, states_of, keys, values, None, {"position_embeddings": rotation})
        kept = kept_columns(stays[0], keys[0])
        if module.masked_key_indices is not None:
            _, head, column = module.masked_key_indices
            kept[head, column] = False
        return kept

    def recording(label: str, options: dict, make, name: str, prompt: int, budget: int) -> Recording:
        press = make()
        press.compression_ratio = 1 - (budget + 0.5) / prompt  # it keeps int((1 - ratio) * length)
        kept = torch.stack([keep(press, name, place, prompt) for place in range(states(name).layers)])
        held = int(kept.sum()) // kept.shape[0] // kept.shape[1]
        ratio = None if held == budget else ratio_of(name, prompt, budget)
        return Recording(label, label.split(",")[0], options, name, prompt, held, kept, ratio=ratio)

    snap = partial(presses["SnapKVPress"], window_size=32)
    small = partial(presses["SnapKVPress"], window_size=8)
    runs = [
        ("chunkkv", {}, lambda: presses["ChunkKVPress"](snap())),
        ("chunkkv, chunk_size=10", {"chunk_size": 10}, lambda: presses["ChunkKVPress"](snap(), chunk_length=10)),
        ("criticalkv", {}, lambda: presses["CriticalKVPress"](snap())),
        ("criticalkv, window_size=8", {"window_size": 8}, lambda: presses["CriticalKVPress"](small())),
        ("criticalkv, head_budget=adaptive-kvpress", ADAPTIVE, lambda: presses["CriticalAdaKVPress"](snap())),
    ]
    recordings = []
    for name in NAMES:
        for prompt, budget in cases(name):
            for label, options, make in runs:
                if budget >= prompt or budget <= options.get("window_size", 32):
                    continue
                recordings.append(recording(label, options, make, name, prompt, budget))
    functions = "kvpress/presses: SnapKVPress, CriticalKVPress, CriticalAdaKVPress, ChunkKVPress"
    save("kvpress", recordings, "NVIDIA/kvpress", checkout, functions)


if __name__ == "__main__":
    main()
