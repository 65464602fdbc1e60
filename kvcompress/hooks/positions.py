"""The position of the token that follows a prompt, for any family (M-RoPE included)."""

import torch
from transformers import PreTrainedModel


def rope_deltas(model: PreTrainedModel) -> torch.Tensor | None:
    """Return the next position minus the number of tokens, (batch, 1), in a model with its own image positions
    (Qwen2-VL).

    The model stores that of its latest prompt. None for other models."""
    return getattr(model.base_model, "rope_deltas", None)


def set_rope_deltas(model: PreTrainedModel, deltas: torch.Tensor | None) -> None:
    """Set the `rope_deltas` of another prompt than the model's latest, so that positions continue after that prompt."""
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = deltas


def next_position(position_ids: torch.Tensor | None, seen: int) -> int:
    """Return the position after a prompt of `seen` tokens, given its positions (1, columns) or (axes, 1, columns), or
    None if they are its columns."""
    if position_ids is None:
        return seen
    # The first of four axes counts columns, as without images.
    return int(position_ids[int(len(position_ids) == 4) :].max()) + 1
