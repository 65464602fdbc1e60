"""Calibration files: safetensors files whose metadata names the model, the method and the data."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from ..errors import KVCompressError, one_line, shown, validated
from ..files import parse_json, replacing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FORMAT = "1"
# Fields of a text model's config that distinguish architectures and that every version of transformers writes alike.
SHAPE = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPE += ("num_key_value_heads", "head_dim")

Shapes = Mapping[str, tuple[str, ...]]
BUNDLED: dict[str, Path] = {}  # name of a model with bundled calibrations -> their folder


@dataclass(frozen=True)
class ModelIdentity:
    """The model that a calibration belongs to.

    Attributes:
        model_type, name: from its config; the name is a hub id or a path, and is not compared.
        layers: number of compressed layers.
        heads, kv_heads, head_dim: sizes of each of these layers.
        fingerprint: hash of the config; models with the same fingerprint have tensors of the same sizes.
    """

    model_type: str
    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    fingerprint: str

    @classmethod
    def of(cls, config: "PreTrainedConfig", layers: int) -> "ModelIdentity":
        """Read the identity from a config; `layers` is as above."""
        text = config.get_text_config(decoder=True)
        heads = config_field(text, "num_attention_heads")
        kv_heads = config_field(text, "num_key_value_heads") or heads
        head_dim = config_field(text, "head_dim") or text.hidden_size // heads
        name = str(config.name_or_path or text.name_or_path)
        return cls(config.model_type, name, layers, heads, kv_heads, head_dim, fingerprint(config))

    def __str__(self) -> str:
        name = f" {shown(self.name)}" if self.name else ""
        shape = f"{self.layers} layers, {self.heads} heads, {self.kv_heads} KV heads of {self.head_dim}"
        return f"{self.model_type}{name} ({shape}, {self.fingerprint})"


def fingerprint(config: "PreTrainedConfig") -> str:
    """Hash the fields of a model's config that determine the sizes of its states."""
    text = config.get_text_config(decoder=True)
    shape = {name: config_field(text, name) for name in SHAPE}
    content = json.dumps({"type": config.model_type, **shape}, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def config_field(config: "PreTrainedConfig", name: str) -> object:
    """Return a field of a config, None if it has none; if layers differ in it, the value in the config's file."""
    try:
        return getattr(config, name, None)
    except Exception:  # an exception of transformers whose name varies by release (Gemma 4)
        return config.to_dict().get(name)


@dataclass(frozen=True)
class Calibration:
    """A method's statistics of a model.

    Attributes:
        method: its registered name.
        model: the model that was measured.
        tensors: the method's tensors, in fp32; the first dimension counts the compressed layers.
        options: the method's options during calibration.
        data: a description of where the prompts came from.
        prompts, tokens: how many there were.
        seed: the seed by which they were drawn.
    """

    method: str
    model: ModelIdentity
    tensors: dict[str, torch.Tensor] = field(repr=False)
    options: dict[str, object] = field(default_factory=dict)
    data: str = ""
    prompts: int = 0
    tokens: int = 0
    seed: int | None = None


def file_of(calibration: str, method: str) -> Path:
    """Return the file that the option `calibration` names: a file, or METHOD.safetensors in a folder or BUNDLED model.

    Raises KVCompressError if the folder has none."""
    path = BUNDLED.get(calibration, Path(calibration))
    if not path.is_dir():
        return path
    if not (file := path / f"{method}.safetensors").is_file():
        raise KVCompressError(f"calibration={shown(str(calibration))}: the folder has no {file.name}")
    return file


def save(calibration: Calibration, path: Path) -> None:
    """Write the file atomically."""
    given = asdict(calibration)
    tensors = given.pop("tensors")
    metadata = {"kvcompress_calibration": FORMAT, **{name: json.dumps(value) for name, value in given.items()}}
    content = safetensors.torch.save({name: part.float().contiguous() for name, part in tensors.items()}, metadata)
    with replacing(path) as draft:
        draft.write_bytes(content)


def load(path: str | Path) -> Calibration:
    """Load a calibration; an unchanged file is opened only once. Raises KVCompressError if it cannot be read."""
    problem = f"calibration={shown(str(path))}"
    try:
        stat = os.stat(path)
        return _load(os.path.realpath(path), stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, KVCompressError):
            raise KVCompressError(f"{problem} {error}") from None
        reason = getattr(error, "strerror", None) or one_line(error, 200)
        raise KVCompressError(f"{problem} cannot be read as a safetensors file: {reason}") from None


@lru_cache(maxsize=16)
def _load(path: str, mtime_ns: int, size: int) -> Calibration:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if (version := metadata.get("kvcompress_calibration")) != FORMAT:
            kind = "a safetensors file without kvcompress's metadata" if version is None else f"of format {version!r}"
            raise KVCompressError(f"is {kind}: `python -m kvcompress calibrate` writes format {FORMAT!r}")
        try:
            given = {name: parse_json(text) for name, text in metadata.items() if name != "kvcompress_calibration"}
            model = validated(ModelIdentity, "model:", given.pop("model"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            found = Calibration(model=model, tensors=tensors, **given)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise KVCompressError(f"has metadata that cannot be read: {one_line(error, 200)}") from None
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise KVCompressError(f"has a tensor {name!r} of {tensor.dtype}, not of {torch.float32}")
    return found


def check_method(calibration: Calibration, path: str | Path, method: str, shapes: Shapes) -> None:
    """Raise KVCompressError unless the file was made for the method and holds its tensors."""
    if calibration.method != method:
        raise KVCompressError(
            f"calibration={shown(str(path))} was made for method {calibration.method!r}, not for {method!r}"
        )
    try:
        check_tensors(calibration.tensors, calibration.model, shapes)
    except KVCompressError as error:
        raise KVCompressError(f"calibration={shown(str(path))}: {error}") from None


def check_tensors(tensors: Mapping[str, torch.Tensor], model: ModelIdentity, shapes: Shapes) -> None:
    """Raise KVCompressError unless these are the tensors named by `shapes`, finite and with the model's sizes.

    `shapes` maps a name to its dimensions, as fields of `ModelIdentity`; `pairs` is half of `head_dim`.
    """
    if tensors.keys() != shapes.keys():
        raise KVCompressError(f"the tensors are {_listed(tensors)}, not {_listed(shapes)}")
    sizes = {**asdict(model), "pairs": model.head_dim // 2}
    for name, dimensions in shapes.items():
        found, wanted = tuple(tensors[name].shape), tuple(sizes.get(dimension, -1) for dimension in dimensions)
        if len(found) != len(wanted) or any(want not in (-1, size) for size, want in zip(found, wanted, strict=True)):
            meant = ", ".join(
                dimension if size == -1 else f"{size} {dimension}"
                for dimension, size in zip(dimensions, wanted, strict=True)
            )
            raise KVCompressError(f"tensor {name!r} has the shape {found}, not ({meant})")
        if not tensors[name].isfinite().all():
            raise KVCompressError(f"tensor {name!r} has numbers that are not finite")


def check_model(calibration: Calibration, path: str | Path, config: "PreTrainedConfig", layers: int) -> None:
    """Raise KVCompressError unless the file belongs to a model with this config and `layers` compressed layers."""
    found, this = calibration.model, ModelIdentity.of(config, layers)
    if (found.fingerprint, found.layers) != (this.fingerprint, this.layers):
        raise KVCompressError(
            f"calibration={shown(str(path))} belongs to another model: it belongs to {found}, this is {this}"
        )


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "none"
