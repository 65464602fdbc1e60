"""The identity of a saved cache's model, which distinguishes it from all others, also in another process."""

import hashlib
import json
import weakref
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from ..calibration.files import config_field, fingerprint
from .model import adapters_at_work, text_decoder, what_a_cache_needs

SAMPLES = 64  # numbers of each weight in the fingerprint
ROTATION = ("rope_parameters", "rope_scaling", "rope_theta")


class ModelReference:
    """A weak reference from a cache to its model. Copies of the cache share it; a pickle has none."""

    def __init__(self, model: PreTrainedModel | None = None):
        self._model = None if model is None else weakref.ref(model)

    def __call__(self) -> PreTrainedModel | None:
        """Return the model; None if it is unknown or gone."""
        return None if self._model is None else self._model()

    def __deepcopy__(self, memo: dict[int, object]) -> "ModelReference":
        return self

    def __reduce__(self) -> tuple:
        return ModelReference, ()


def model_identity(model: PreTrainedModel) -> dict[str, str]:
    """Return what two models must have in common for a cache of one to be right in the other, as short strings.

    Some numbers of each weight are sampled, spread over it. Training and merging change them, but a change to a few
    numbers of one weight may go unnoticed."""
    decoder, config = text_decoder(model), model.config
    rotation = {name: config_field(decoder.config, name) for name in ROTATION}
    return {
        "architecture": type(model).__name__,
        "config": _digest(json.dumps([what_a_cache_needs(config), fingerprint(config), rotation], default=str)),
        "dtype": str(decoder.dtype),
        "adapters": _digest(repr(adapters_at_work(decoder))),
        "weights": weights_fingerprint(model),
    }


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Hash some numbers of each weight, the same on every device."""
    found = hashlib.sha256()
    for name, weight in _weights(model):
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)} ".encode())
        found.update(_sample(weight))
    return found.hexdigest()[:16]


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield everything that a checkpoint would hold, quantized weights as they are."""
    for name, module in model.named_modules():
        buffers = {key: part for key, part in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, weight in {**module._parameters, **buffers}.items():
            if weight is not None:
                yield f"{name}.{key}", weight


@torch.no_grad()
def _sample(weight: torch.Tensor) -> bytes:
    if is_traceable_wrapper_subclass(weight):  # such as torchao's: tensors in a tensor
        return b"".join(_sample(getattr(weight, name)) for name in weight.__tensor_flatten__()[0])
    numbers = weight.numel()
    if weight.device.type == "meta" or not numbers:  # meta: offloaded by accelerate
        return b""
    count = min(numbers, SAMPLES)
    places = torch.arange(count, device=weight.device) * (numbers - 1) // max(count - 1, 1)
    as_bytes = weight.detach().contiguous().flatten().view(torch.uint8).view(numbers, weight.element_size())
    return as_bytes[places].cpu().numpy().tobytes()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
