"""Time the vision tower's calls, and reuse their outputs from another cell where possible."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from kvcompress.device import peak_memory, synchronise
from kvcompress.hooks.replacement import wrapped


@dataclass(frozen=True)
class Encoded:
    """The result of one call of the vision tower: the base model's `get_image_features` or `get_video_features`.

    Attributes:
        output: the returned output, without the hidden states that no model reads.
        device: the device of the output.
        seconds: the time that the call took.
        peak_memory: peak bytes from the start of `generate` to the end of the call; see `kvcompress.measure`.
    """

    output: Any
    device: torch.device
    seconds: float
    peak_memory: int

    def to(self, device: torch.device) -> Any:
        """Return the output on a device. Lists and dicts are copied, because beam search writes into them."""
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), self.output)


class VisionTower:
    """Context manager that times a vision tower's calls in one generation and takes their outputs from `known`.

    Enter it before `kvcompress.compress(...)`, so that the session's own hooks on the tower still see every call.

    Attributes:
        calls: the result of each call, in order.
        spent_s: seconds that the calls took in this generation.
    """

    def __init__(self, model: PreTrainedModel, known: dict[tuple[str, int], Encoded], held: int = 0):
        """`held`: bytes to subtract from the memory peak."""
        self.model, self.held = model.base_model, held
        self._is_encoding = False
        self.begin(known)

    def begin(self, known: dict[tuple[str, int], Encoded]) -> None:
        """Start another generation: forget the calls so far."""
        self.known, self.spent_s = known, 0.0
        self.calls: dict[tuple[str, int], Encoded] = {}

    @property
    def seconds(self) -> float | None:
        """Seconds that the calls took when the tower ran; None without calls."""
        return sum(each.seconds for each in self.calls.values()) if self.calls else None

    @property
    def correction_s(self) -> float:
        """Seconds to add to this generation's time to get that of one in which the tower runs."""
        return (self.seconds or 0.0) - self.spent_s

    @property
    def is_known(self) -> bool:
        """Whether the outputs of all calls were known, so that the tower did not run."""
        return bool(self.calls) and self.calls.keys() <= self.known.keys()

    def __enter__(self) -> "VisionTower":
        self._replaced = [
            wrapped(self.model, name, functools.partial(self._encode, modality))
            for modality in ("image", "video")
            if hasattr(self.model, name := f"get_{modality}_features")
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for replacement in self._replaced:
            replacement.remove()

    def _encode(self, modality: str, encode: Callable, *args: Any, **kwargs: Any) -> Any:
        if self._is_encoding:  # Qwen3-VL encodes videos through get_image_features
            return encode(*args, **kwargs)
        call = (modality, sum(name == modality for name, _ in self.calls))
        device = self.model.device
        synchronise(device)
        start = time.perf_counter()
        if call in self.known:
            found = self.known[call]
            output = found.to(found.device)
        else:
            self._is_encoding = True
            try:
                output = without_hidden_states(encode(*args, **kwargs))
            finally:
                self._is_encoding = False
        synchronise(device)
        seconds = time.perf_counter() - start
        self.spent_s += seconds
        if call not in self.known:
            peak = peak_memory(device) - self.held
            copied = tree_map(lambda leaf: leaf, output)  # its containers only
            found = Encoded(copied, device, seconds, peak)
        self.calls[call] = found
        return output


def without_hidden_states(output: Any) -> Any:
    """Drop what the language model does not read from a vision tower's output: it would occupy memory for the whole
    generation. Output of another type is returned unchanged."""
    if not isinstance(output, ModelOutput) or output.get("pooler_output") is None:
        return output
    dropped = ("last_hidden_state", "hidden_states", "attentions")
    return type(output)(**{name: value for name, value in output.items() if name not in dropped})


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in `value`."""
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
