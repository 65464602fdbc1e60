"""Chunked prefill (`prefill_chunk=`): a long prompt passes through the language model piece by piece, and what is
stored is compressed after each, so that memory holds a chunk and a budget, never the whole prompt's keys.

The model's own forward runs once: images are encoded, embeddings put together and positions (M-RoPE) computed for the
whole prompt, which all are linear in it and small. A hook on the way into the text decoder then feeds the decoder all
chunks but the last, one after the other, and lets the pass go on with the last: its hidden states and logits are what
the model returns. Each chunk attends over what was kept of those before it and, causally, over itself, at its true
positions (as a second prompt on a filled cache does); then each layer chooses anew among its stored entries and the
chunk's, see `cache.passes.LaterChunk`.

Chunks are counted from the end, where all rows of a padded batch are aligned: a row is cut as it would be alone, and
only the first chunk may be shorter.
"""

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..errors import KVCompressError

BY_COLUMN = ("input_ids", "position_ids", "cache_position")  # their last axis is the prompt's columns


def feed_in_chunks(decoder: PreTrainedModel, cache: CompressedCache) -> list[RemovableHandle]:
    """Let the prefill that `cache` was told of go through `decoder` in chunks of `prefill_chunk` tokens.

    Returns:
        What undoes it; nothing where the prompt is a single chunk.
    """
    size, whole = cache.policy.engine.prefill_chunk, cache.announced
    if whole.columns <= size:
        return []
    stops = range(whole.columns, 0, -size)[::-1]
    is_nested = False

    def feed(decoder: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        nonlocal is_nested
        if is_nested:
            return None
        if args:
            kwargs = {"input_ids": args[0], **kwargs}
        start = 0
        for stop in stops:
            cache.begin(whole.columns_from(start, stop))
            part = columns_of(kwargs, start, stop, whole.columns)
            if stop == whole.columns:
                return (), part
            is_nested = True
            try:
                decoder(**part)
            finally:
                is_nested = False
            start = stop

    return [decoder.register_forward_pre_hook(feed, with_kwargs=True)]


def columns_of(kwargs: dict, start: int, stop: int, columns: int) -> dict:
    """The arguments of a text decoder for columns `start` to `stop` of a prompt of `columns`. Raises KVCompressError
    for a tensor that nobody knows how to cut."""
    part = {}
    for name, value in kwargs.items():
        if name in BY_COLUMN and value is not None:
            value = value[..., start:stop]
        elif name in ("inputs_embeds", "per_layer_inputs", "visual_pos_masks") and value is not None:
            value = value[:, start:stop]
        elif name == "attention_mask" and value is not None:
            if not isinstance(value, torch.Tensor) or value.ndim != 2:
                raise KVCompressError(
                    "prefill_chunk= needs a 2-D attention mask (batch, tokens), left-padded, or none: it cannot cut "
                    "one of queries and keys, as models make where an image's tokens see each other both ways"
                )
            value = value[:, : value.shape[1] - columns + stop]
        elif name == "deepstack_visual_embeds" and value is not None:
            vision = kwargs["visual_pos_masks"]  # packed: one line per True, row by row
            inside = torch.zeros_like(vision)
            inside[:, start:stop] = True
            value = [features[inside[vision].to(features.device)] for features in value]
        elif isinstance(value, torch.Tensor):
            raise KVCompressError(f"prefill_chunk= cannot cut {name}=, which this model gives to its text decoder")
        part[name] = value
    return part
