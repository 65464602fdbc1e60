"""A filled cache in a file: safetensors tensors, described by JSON in the metadata. The file contains no code.

A cache is a tree of layers, memories, storages and their contents. Tensors of the tree are tensors of the file. An
object is saved as its class, one of `KINDS`, and its state; numbers and strings are saved as they are. `Storage.state`
defines the state of a storage."""

import hashlib
import json
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..device import device_of
from ..errors import KVCompressError, one_line, shown
from ..files import parse_json, replacing
from ..hooks.model import text_decoder
from ..hooks.model_identity import model_identity
from ..policy.policy import Policy
from ..scoring.rotary import Rotary
from ..version import __version__
from .memory import SequenceLog
from .protected import Protected
from .storage.base import Storage
from .storage.dense import DenseStorage
from .storage.fp8 import Fp8Storage
from .storage.offloaded import OffloadedStorage
from .storage.quantized import QuantizedStorage
from .storage.ragged import RaggedStorage
from .storage.static import StaticStorage
from .storage.think import ThinKStorage
from .storage.turboquant import TurboQuantStorage

FORMAT = 2  # increase when trees of this format would be misread
KEY = "kvcompress_cache"
STORAGES = (DenseStorage, RaggedStorage, StaticStorage, QuantizedStorage, TurboQuantStorage, ThinKStorage)
STORAGES += (Fp8Storage, OffloadedStorage)
KINDS = {kind.__name__: kind for storage in STORAGES for kind in (storage, *storage.parts)}
KINDS |= {kind.__name__: kind for kind in (Protected, Rotary, SequenceLog)}
CPU = torch.device("cpu")


def write(path: str | Path, model: PreTrainedModel, policy: Policy, content: dict[str, object]) -> None:
    """Write a cache of the model to a file, completely or not at all. `content` is what `read` returns."""
    if (model.tp_size or 1) > 1:
        raise KVCompressError("tensor-parallel caches are not saved: each process holds only its own KV heads")
    writer = _Writer()
    document = {
        "format": FORMAT,
        "kvcompress": __version__,
        "transformers": transformers.__version__,
        "model": model_identity(model),
        "policy": writer.tree(in_force(policy), "policy"),
        "content": {name: writer.tree(value, name) for name, value in content.items()},
    }
    document["sha256"] = _checksum(document, writer.tensors)
    try:
        with replacing(Path(path)) as draft:
            save_file(writer.tensors, draft, {KEY: json.dumps(document, sort_keys=True)})
    except (OSError, ValueError, SafetensorError) as error:
        raise KVCompressError(f"{shown(str(path))} cannot be written: {_message(error)}") from None


@contextmanager
def read(path: str | Path, model: PreTrainedModel) -> Iterator["Reader"]:
    """Context manager that reads a cache saved for the model.

    Any error, also inside the context, becomes a KVCompressError of one line that names the file."""
    try:
        with safe_open(path, framework="pt") as file, torch.inference_mode(False), torch.no_grad():
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            document = _document(file.metadata(), tensors)
            _check_origin(document, model)
            yield Reader(document, tensors, model)
    except KVCompressError as error:
        raise KVCompressError(f"{shown(str(path))}: {error}") from None
    except (OSError, SafetensorError) as error:
        raise KVCompressError(f"{shown(str(path))} cannot be read as a saved cache: {_message(error)}") from None
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise KVCompressError(f"{shown(str(path))} is not a valid saved cache: {_message(error)}") from None


def in_force(policy: Policy) -> dict[str, object]:
    """Return the settings that identify a policy."""
    return {"method": policy.method, "ratio": policy.budget.ratio, "budget": policy.budget.entries, **policy.options}


def differences(ours: dict[str, object], theirs: dict[str, object]) -> str:
    """Return `name=ours, not theirs` for all differences; empty if there are none."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return "; ".join(f"{name}={shown(ours.get(name))}, not {shown(theirs.get(name))}" for name in names)


def _document(metadata: dict[str, str] | None, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the file's metadata after checking its format and checksum."""
    if KEY not in (metadata or {}):
        raise KVCompressError("it is a safetensors file, but was not written by CompressedCache.save")
    document = parse_json(metadata[KEY])
    if (found := document.get("format")) != FORMAT:
        raise KVCompressError(
            f"its format is {shown(found)}, written by kvcompress {shown(document.get('kvcompress'))}; this is "
            f"{__version__}, which reads format {FORMAT}"
        )
    if document.pop("sha256", None) != _checksum(document, tensors):
        raise KVCompressError("it is damaged: its checksum does not match its contents")
    return document


def _check_origin(document: dict[str, Any], model: PreTrainedModel) -> None:
    """Raise KVCompressError unless the cache was saved with this version of transformers and for this model."""
    if document["transformers"] != transformers.__version__:
        raise KVCompressError(
            f"it was saved with transformers {document['transformers']}; this is {transformers.__version__}, whose "
            "models may compute other keys: prefill the prompt again"
        )
    if differing := differences(document["model"], model_identity(model)):
        raise KVCompressError(f"it was saved from another model than this {type(model).__name__}: {differing}")


def _layer_devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Return the device of each layer whose module has a `layer_idx`."""
    devices: dict[int, torch.device] = {}
    for module in text_decoder(model).modules():
        device = device_of(module)
        if isinstance(getattr(module, "layer_idx", None), int) and device is not None:
            devices.setdefault(module.layer_idx, device)
    return devices


class _Writer:
    """Converts values to trees for JSON.

    Attributes:
        tensors: the tensors of all trees so far, in CPU memory, each with its own storage.
    """

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, tuple[str, torch.Tensor]] = {}  # by id; the tensor keeps its id from being reused

    def tree(self, value: object, name: str) -> Any:
        """Return a value for JSON: the value itself, or a dictionary with its kind as the only key.

        `name` is the prefix of its tensors' names."""
        match value:
            case None | bool() | str():
                return value
            case numbers.Integral():
                return int(value)
            case numbers.Real():
                return float(value)
            case list():
                return self._trees(value, name)
            case torch.Size():
                return {"size": list(value)}
            case tuple():
                return {"tuple": self._trees(value, name)}
            case dict():
                return {"dict": [[key, self.tree(each, f"{name}.{key}")] for key, each in value.items()]}
            case torch.Tensor():
                return {"tensor": self._named(value, name)}
            case torch.dtype():
                return {"dtype": str(value).removeprefix("torch.")}
            case torch.device():  # its layer's device, whichever that will be
                return {"device": None}
        kind = type(value)
        if KINDS.get(kind.__name__) is not kind:
            raise KVCompressError(f"a {kind.__name__} in the CompressedCache ({name}) cannot be saved")
        if isinstance(value, Storage):
            state = value.state()
        else:
            state = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        return {"object": [kind.__name__, self.tree(state, name)]}

    def _trees(self, values: list | tuple, name: str) -> list[Any]:
        return [self.tree(each, f"{name}.{place}") for place, each in enumerate(values)]

    def _named(self, tensor: torch.Tensor, name: str) -> str:
        """Return the tensor's name in the file; the same tensor always has the same name."""
        if id(tensor) not in self._names:
            self._names[id(tensor)] = name, tensor
            part = tensor.detach().cpu().contiguous()
            self.tensors[name] = part if part.nbytes == part.untyped_storage().nbytes() else part.clone()
        return self._names[id(tensor)][0]


class Reader:
    """The contents of a file, for the model that it is loaded for."""

    def __init__(self, document: dict[str, Any], tensors: dict[str, torch.Tensor], model: PreTrainedModel):
        self._document, self._tensors = document, tensors
        self._device, self._devices = device_of(model), _layer_devices(model)
        self._made: dict[tuple[str, torch.device], torch.Tensor] = {}

    def value(self, name: str) -> Any:
        """Return a saved value, with its tensors on the model's device."""
        return self._value(self._document["content"][name], self._device)

    def layers(self) -> Iterator[tuple[dict[str, object], torch.device]]:
        """Yield the state of each layer of the model, on its device, and the device."""
        for layer_idx, tree in enumerate(self._document["content"]["layers"]):
            device = self._devices.get(layer_idx, self._device)
            yield self._value(tree, device), device

    def check(self, policy: Policy) -> None:
        """Raise KVCompressError unless the saved cache had this policy."""
        written = self._value(self._document["policy"], CPU)
        if differing := differences(written, in_force(policy)):
            raise KVCompressError(f"it was compressed with options that have another meaning here: {differing}")

    def _value(self, tree: Any, device: torch.device) -> Any:
        """Return the value of a tree, with new tensors on the device."""
        if isinstance(tree, list):
            return [self._value(each, device) for each in tree]
        if not isinstance(tree, dict):
            return tree
        ((tag, content),) = tree.items()
        match tag:
            case "size":
                return torch.Size(content)
            case "tuple":
                return tuple(self._value(content, device))
            case "dict":
                return {key: self._value(each, device) for key, each in content}
            case "tensor":
                return self._tensor(content, device)
            case "dtype":
                return getattr(torch, content)
            case "device":
                return device
        name, state = content
        kind = KINDS[name]
        if is_dataclass(kind):
            return kind(**self._value(state, device))
        if kind is OffloadedStorage:
            parts = {part: self._value(each, CPU if part == "inner" else device) for part, each in state["dict"]}
            return kind.of_state(parts, device)
        return kind.of_state(self._value(state, device), device)

    def _tensor(self, name: str, device: torch.device) -> torch.Tensor:
        if (name, device) not in self._made:
            self._made[name, device] = self._tensors[name].to(device, copy=True)
        return self._made[name, device]


def _checksum(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _message(error: Exception) -> str:
    return getattr(error, "strerror", None) or one_line(error, 200) or type(error).__name__
