"""flash_attn.bert_padding: from a padded batch to sequences laid end to end, and back."""

import torch


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """hidden_states (batch, tokens, ...), attention_mask (batch, tokens) -> the real tokens (real, ...), their
    places in the flattened batch, where each sequence starts and ends, the longest length, all lengths."""
    if unused_mask is not None:
        raise NotImplementedError("the flash-attn stand-in has no unused_mask")
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    places = attention_mask.flatten().nonzero().flatten()
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[places], places, ends, int(lengths.max()), lengths


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse: hidden_states (real, ...) -> (batch, seqlen, ...), zeros where there is padding."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded[indices] = hidden_states
    return padded.unflatten(0, (batch, seqlen))
