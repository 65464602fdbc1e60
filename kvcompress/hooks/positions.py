"""The position of the token that follows a prompt, for any family (M-RoPE included)."""

import torch
from transformers import PreTrainedModel


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
