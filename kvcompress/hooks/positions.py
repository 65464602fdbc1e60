"""The position of the token that follows a prompt, for any family (M-RoPE included)."""

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache


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


def next_position(position_ids: torch.Tensor | None, seen: int) -> int:
    """Return the position after a prompt of `seen` tokens, given its positions (1, columns) or (axes, 1, columns); None
    if it has no other than its columns."""
    if position_ids is None:
        return seen
    # The first of four axes counts columns, as without images.
    return int(position_ids[int(len(position_ids) == 4) :].max()) + 1
