"""The position of the token that follows a prompt, for any family (M-RoPE included)."""

import inspect

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache

_entered: list["PositionRecorder"] = []


def note_positions(decoder: PreTrainedModel, position_ids: torch.Tensor | None) -> None:
    """Report a prompt's positions to the recorders of `decoder`, if the prompt does not pass through it."""
    for recorder in _entered:
        if recorder.decoder is decoder:
            recorder.note(position_ids)


def note_last_position(decoder: PreTrainedModel, cache: CompressedCache) -> RemovableHandle:
    """Let a prompt's pass through `decoder` set `cache.last_position`, until the returned handle is removed."""

    def before_forward(decoder: PreTrainedModel, args: tuple, kwargs: dict) -> None:
        positions = kwargs.get("position_ids")
        if positions is not None and cache.last_position is None:  # further passes read parts of the prompt
            cache.last_position = positions[..., -1:]

    return decoder.register_forward_pre_hook(before_forward, with_kwargs=True)


def rope_deltas(model: PreTrainedModel) -> torch.Tensor | None:
    """Return the next position minus the number of tokens, (batch, 1), in a model with its own image positions
    (Qwen2-VL).

    The model stores that of its latest prompt. None for other models."""
    return getattr(model.base_model, "rope_deltas", None)


def go_on_from(model: PreTrainedModel, deltas: torch.Tensor | None) -> None:
    """Let the model continue positions after another prompt than its latest, given that prompt's `rope_deltas`."""
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = deltas


class PositionRecorder:
    """Context manager that records the positions that a text decoder gets for one prompt.

    Attributes:
        position_ids: LongTensor (1, columns) or (axes, 1, columns); None if the decoder counts columns itself.
    """

    def __init__(self, decoder: PreTrainedModel):
        self.decoder = decoder
        self._names = list(inspect.signature(decoder.forward).parameters)
        self.position_ids: torch.Tensor | None = None

    def __enter__(self) -> "PositionRecorder":
        self._is_noted = False
        self._hook = self.decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        _entered.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        if self in _entered:
            _entered.remove(self)

    def _before_forward(self, decoder: PreTrainedModel, args: tuple, kwargs: dict) -> None:
        self.note((dict(zip(self._names, args, strict=False)) | kwargs).get("position_ids"))

    def note(self, position_ids: torch.Tensor | None) -> None:
        if not self._is_noted:  # further passes read parts of the prompt again
            self.position_ids, self._is_noted = position_ids, True

    def next(self, seen: int) -> tuple[int, int]:
        """Return the position after `seen` tokens and its number of axes, 0 if a token has a single position."""
        ids = self.position_ids
        if ids is None or ids.ndim < 3:
            return (seen if ids is None else int(ids.max()) + 1), 0
        axes = ids[1:] if len(ids) == 4 else ids  # the first of four axes counts columns, as without images
        return int(axes.max()) + 1, 3
