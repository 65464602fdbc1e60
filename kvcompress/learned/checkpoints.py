"""Checkpoints of learned scores in their published layouts: read, local or from the hub, and written."""

import json
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from ..errors import KVCompressError, one_line, shown
from ..files import parse_json, replacing, write_torch

HUB = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+)?", re.ASCII)
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """The weights trained for one model.

    Attributes:
        layers: for each of the model's layers, weights by name.
        hidden_size, kv_heads: the model's sizes.
    """

    layers: list[Weights]
    hidden_size: int
    kv_heads: int
    _moved: dict[tuple, Weights] = field(default_factory=dict)

    def weights(self, layer_idx: int, hidden: torch.Tensor) -> Weights:
        """Return a layer's weights on the device and in the precision of `hidden`."""
        key = layer_idx, hidden.device, hidden.dtype
        if key not in self._moved:
            self._moved[key] = {name: part.to(hidden) for name, part in self.layers[layer_idx].items()}
        return self._moved[key]


def read_once(*names: str) -> Callable[[Callable[[str], Trained]], Callable[[str], Trained]]:
    """Return a decorator of a function that loads a checkpoint with these files: an unchanged one is loaded once."""

    def decorated(load: Callable[[str], Trained]) -> Callable[[str], Trained]:
        kept = lru_cache(maxsize=16)(lambda checkpoint, *states: load(checkpoint))

        @wraps(load)
        def loaded(checkpoint: str) -> Trained:
            return kept(checkpoint, *(_state(Path(checkpoint, name)) for name in names))

        return loaded

    return decorated


def _state(file: Path) -> tuple[int, ...] | None:
    """Return numbers that identify a local file's content; None if there is none, as of a checkpoint from the hub."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size


@read_once("config.json", "model.safetensors")
def kvzap(checkpoint: str) -> Trained:
    """Load NVIDIA's KVzap surrogates (hub: nvidia/KVzap-linear-..., nvidia/KVzap-mlp-...).

    The folder has config.json (`input_dim`, `output_dim`, `n_modules`, and `hidden_dim`, which is null for a linear
    one) and model.safetensors. Layer i's weights are `layers.i.weight` and `layers.i.bias`, or `layers.i.0...` and
    `layers.i.2...` for an MLP."""
    with reading(checkpoint, "KVzap"):
        config = parse_json(_file(checkpoint, "config.json").read_bytes())
        tensors = load_file(_file(checkpoint, "model.safetensors"))
        size, heads, inner = config["input_dim"], config["output_dim"], config["hidden_dim"]
        shapes = {"weight": (heads, size), "bias": (heads,)}
        if inner is not None:
            shapes = {"0.weight": (inner, size), "0.bias": (inner,), "2.weight": (heads, inner), "2.bias": (heads,)}
        layers = [
            {name: _of_shape(tensors, f"layers.{layer}.{name}", shape) for name, shape in shapes.items()}
            for layer in range(config["n_modules"])
        ]
    return Trained(layers, size, heads)


def save_kvzap(layers: list[Weights], folder: Path) -> None:
    """Write a new folder that `kvzap` loads, atomically; `layers` has each layer's weights by name."""
    first = layers[0].get("weight", layers[0].get("0.weight"))
    mlp = "0.weight" in layers[0]
    heads = layers[0]["2.bias" if mlp else "bias"].shape[0]
    config = {"model_type": "kvzap", "architectures": ["KVzapModel"], "input_dim": first.shape[1], "output_dim": heads}
    config |= {"hidden_dim": first.shape[0] if mlp else None, "n_modules": len(layers)}
    tensors = {
        f"layers.{i}.{name}": part.contiguous() for i, layer in enumerate(layers) for name, part in layer.items()
    }
    with replacing(folder) as draft:
        draft.mkdir()
        (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        (draft / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))


@read_once("")
def fastkvzip(checkpoint: str) -> Trained:
    """Load NAVER's Fast KVzip gates (hub: Jang-Hyun/Fast-KVzip/MODEL/q4_dim16_sink16.pt).

    The file of torch.save has, under `module`, one dictionary of tensors per layer: `q_proj`, `k_proj`, `q_norm`,
    `k_norm`, `k_base` (kv_heads, 1, sinks, size) and `b` (kv_heads, 1, groups)."""
    with reading(checkpoint, "Fast KVzip"):
        core = getattr(np, "_core", None) or np.core
        plain = [(core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"), np.ndarray, np.dtype]
        with torch.serialization.safe_globals([*plain, np.dtypes.Float64DType, np.dtypes.Float32DType]):
            found = torch.load(_file(checkpoint), map_location="cpu", weights_only=True)["module"]
        heads, _, sinks, size = found[0]["k_base"].shape
        groups, hidden = found[0]["b"].shape[2], found[0]["k_proj.weight"].shape[1]
        shapes = {
            "q_proj.weight": (heads * groups * size, hidden),
            "q_proj.bias": (heads * groups * size,),
            "k_proj.weight": (heads * size, hidden),
            "q_norm.weight": (size,),
            "k_norm.weight": (size,),
            "k_base": (heads, 1, sinks, size),
            "b": (heads, 1, groups),
        }
        layers = [{name: _of_shape(layer, name, shape) for name, shape in shapes.items()} for layer in found]
    return Trained(layers, hidden, heads)


def save_fastkvzip(layers: list[Weights], path: Path) -> None:
    """Write a file that `fastkvzip` loads, atomically; `layers` has each layer's weights by name."""
    write_torch(path, {"module": layers})


@contextmanager
def reading(checkpoint: str, layout: str) -> Iterator[None]:
    """Turn errors in reading a checkpoint into a KVCompressError of one line."""
    unreadable = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError)
    unreadable = (*unreadable, SafetensorError, pickle.UnpicklingError, EOFError)
    try:
        yield
    except KVCompressError:
        raise
    except unreadable as error:
        reason = f"{type(error).__name__}: {one_line(error, 300)}"
        raise KVCompressError(f"checkpoint={shown(checkpoint)} is not a {layout} checkpoint: {reason}") from error


def _file(checkpoint: str, name: str = "") -> Path:
    """Return a checkpoint's file: a local file, one in a local folder, or OWNER/NAME/... from the hub."""
    local = Path(checkpoint, name)
    if local.is_file():
        return local
    if Path(checkpoint).exists() or not HUB.fullmatch(checkpoint):
        raise KVCompressError(f"checkpoint={shown(checkpoint)}: there is no file {shown(str(local))}")
    owner, repository, *inside = checkpoint.split("/")
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", "/".join(filter(None, [*inside, name]))))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise KVCompressError(
            f"checkpoint={shown(checkpoint)} is not a local file and cannot be downloaded from the hub"
        ) from error


def _of_shape(tensors: Weights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensors[name].shape) != shape:
        raise ValueError(f"{name} is {tuple(tensors[name].shape)}, not {shape}")
    if not (tensors[name].is_floating_point() and tensors[name].isfinite().all()):
        raise ValueError(f"{name} has values that are not finite floating-point numbers")
    return tensors[name]
