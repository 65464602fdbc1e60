"""Which model a saved cache is of: what tells it from every other, also in another process."""

import hashlib
import json
import weakref
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from ..calibration.files import config_field, fingerprint
from .model import adapters_at_work, text_decoder, what_a_cache_needs

SAMPLES = 64  # numbers of each weight that the fingerprint looks at
ROTATION = ("rope_parameters", "rope_scaling", "rope_theta")


class ModelReference:
    """A cache's way to its model, which it does not keep alive. A copy of the cache has the same; in a pickle there is
    none."""

    def __init__(self, model: PreTrainedModel | None = None):
        self._model = None if model is None else weakref.ref(model)

    def __call__(self) -> PreTrainedModel | None:
        """The model, None where it is not known or gone."""
        return None if self._model is None else self._model()

    def __deepcopy__(self, memo: dict[int, object]) -> "ModelReference":
        return self

    def __reduce__(self) -> tuple:
        return ModelReference, ()


def model_identity(model: PreTrainedModel) -> dict[str, str]:
    """What two models must have in common for a cache of one to be right in the other, as short texts.

    Of each weight some numbers are looked at, spread over it: training and merging change them, but a change of few
    numbers of one weight may go unseen.
    """
    decoder, config = text_decoder(model), model.config
    rotation = {name: config_field(decoder.config, name) for name in ROTATION}
    return {
        "architecture": type(model).__name__,
        "config": _digest(json.dumps([what_a_cache_needs(config), fingerprint(config), rotation], default=str)),
        "dtype": str(decoder.dtype),
        "adapters": _digest(repr(adapters_at_work(decoder))),
        "weights": _weights_fingerprint(model),
    }


def _weights_fingerprint(model: PreTrainedModel) -> str:
    found = hashlib.sha256()
    for name, weight in _weights(model):
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)} ".encode())
        found.update(_sample(weight))
    return found.hexdigest()[:16]


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """All that a checkpoint would hold, quantized weights as they lie."""
    for name, module in model.named_modules():
        buffers = {key: part for key, part in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, weight in {**module._parameters, **buffers}.items():
            if weight is not None:
                yield f"{name}.{key}", weight


@torch.no_grad()
def _sample(weight: torch.Tensor) -> bytes:
    if is_traceable_wrapper_subclass(weight):  # torchao's and the like: tensors in a tensor
        return b"".join(_sample(getattr(weight, name)) for name in weight.__tensor_flatten__()[0])
    numbers = weight.numel()
    if weight.device.type == "meta" or not numbers:  # meta: accelerate has it elsewhere
        return b""
    count = min(numbers, SAMPLES)
    places = torch.arange(count, device=weight.device) * (numbers - 1) // max(count - 1, 1)
    as_bytes = weight.detach().contiguous().flatten().view(torch.uint8).view(numbers, weight.element_size())
    return as_bytes[places].cpu().numpy().tobytes()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
