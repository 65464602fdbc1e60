"""kvpress 0.5.5 from the package index (entropy_gated_chunkkv_press.py, over its SnapKV); CHECKOUT is the folder that
it was installed into."""

import sys
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from .recording import Recording, kept_columns, save
from .states import NAMES, cases, states

LABEL = "entropy-gated-chunkkv"
TIES = "of the window's tokens, which score alike, top-k takes any; see test_entropy_gated_chunkkv.py"
DIFFERENCES = {f"{LABEL}/": (0.97, TIES), f"{LABEL}, ": (0.84, TIES)}


def main() -> None:
    checkout = Path(sys.argv[1])
    for name in ("kvpress", "kvpress.presses"):  # its own __init__ wants other libraries
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(checkout / name.replace(".", "/"))]
    utils = sys.modules["kvpress.utils"] = ModuleType("kvpress.utils")
    utils.get_prerope_query_states = lambda module, hidden: module.queries[:, :, -hidden.shape[1] :]
    utils.extract_keys_and_values = utils.get_prerope_key_states = utils.compute_n_kept = None
    snapkv = import_module("kvpress.presses.snapkv_press").SnapKVPress
    theirs = import_module("kvpress.presses.entropy_gated_chunkkv_press").EntropyGatedChunkKVPress

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
            for label, options, make in (
                (LABEL, {}, lambda: theirs(snapkv(window_size=32))),
                (f"{LABEL}, window_size=8", {"window_size": 8}, lambda: theirs(snapkv(window_size=8))),
                (
                    f"{LABEL}, chunk_size=16, spiky_size=2",
                    {"window_size": 8, "chunk_size": 16, "spiky_size": 2},
                    partial(theirs, snapkv(window_size=8), chunk_length=16, low_entropy_chunk_length=2),
                ),
            ):
                if budget >= prompt or budget <= options.get("window_size", 32):
                    continue
                press = make()
                press.press.compression_ratio = 1 - (budget + 1e-3) / prompt  # it keeps int((1 - ratio) * length)
                kept = torch.stack([keep(press, name, place, prompt) for place in range(states(name).layers)])
                recordings.append(Recording(label, LABEL, options, name, prompt, budget, kept))
    version = "v" + next(metadata.distributions(name="kvpress", path=[str(checkout)])).version
    functions = "presses/entropy_gated_chunkkv_press.py: EntropyGatedChunkKVPress"
    save("entropy_gated_chunkkv", recordings, "NVIDIA/kvpress", checkout, functions, version)


if __name__ == "__main__":
    main()
