"""Tiny random checkpoints of learned methods, in their published layouts, for any model."""

import json
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = tempfile.TemporaryDirectory(prefix="kvcompress-checkpoints-")
SINKS, SIZE = 3, 4  # of a gate


def checkpoint_for(method: str, model: torch.nn.Module) -> str:
    """Return the path of a checkpoint that fits the model."""
    text = model.config.get_text_config(decoder=True)
    groups = text.num_attention_heads // text.num_key_value_heads
    return _made(method, text.num_hidden_layers, text.hidden_size, text.num_key_value_heads, groups)


@cache
def _made(method: str, layers: int, hidden: int, heads: int, groups: int) -> str:
    path = Path(FOLDER.name) / f"{method}-{layers}-{hidden}-{heads}-{groups}"
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) / shape[-1] ** 0.5

    if method == "fastkvzip":
        gates = [
            {
                "q_proj.weight": 3 * normal(heads * groups * SIZE, hidden),
                "q_proj.bias": normal(heads * groups * SIZE),
                "k_proj.weight": 3 * normal(heads * SIZE, hidden),
                "q_norm.weight": 1 + normal(SIZE),
                "k_norm.weight": 1 + normal(SIZE),
                "k_base": normal(heads, 1, SINKS, SIZE),
                "b": normal(heads, 1, groups),
            }
            for _ in range(layers)
        ]
        torch.save({"module": gates}, path.with_suffix(".pt"))
        return str(path.with_suffix(".pt"))
    write_kvzap(path, layers, hidden, heads, 5 if method == "kvzap" else None)
    return str(path)


def write_kvzap(path: Path, layers: int, hidden: int, heads: int, inner: int | None) -> None:
    """Write a KVzap surrogate: an MLP of `inner` channels, or a linear map."""
    draw = torch.Generator().manual_seed(1)
    linears = {"": (hidden, heads)} if inner is None else {"0.": (hidden, inner), "2.": (inner, heads)}
    tensors = {}
    for layer in range(layers):
        for name, (size, out) in linears.items():
            tensors[f"layers.{layer}.{name}weight"] = torch.randn(out, size, generator=draw)
            tensors[f"layers.{layer}.{name}bias"] = torch.randn(out, generator=draw)
    path.mkdir(parents=True)
    config = {"model_type": "kvzap", "input_dim": hidden, "output_dim": heads, "n_modules": layers, "hidden_dim": inner}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, path / "model.safetensors")
