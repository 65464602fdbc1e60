"""Chunked prefill (`prefill_chunk=`): the language model reads a long prompt chunk by chunk.

The stored entries are compressed after each chunk, so memory holds a chunk and a budget, never the whole prompt's keys.

The model's own forward runs once. It encodes images, assembles embeddings and computes positions (M-RoPE) for the whole
prompt; all of this is small and linear in its length. A pre-forward hook on the text decoder then feeds the decoder all
chunks but the last, one after the other, and lets the pass continue with the last one: the model returns its hidden
states and logits. Each chunk attends to the kept entries of earlier chunks and, causally, to itself, at its true
positions, as a second prompt on a filled cache does. Then each layer chooses again among its stored entries and the
chunk's, see `cache.phases.LaterChunk`.

Chunks are counted from the end, where all rows of a padded batch are aligned. A row is therefore cut in the same places
as it would be alone, and only the first chunk may be shorter.
"""

import inspect
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..errors import KVCompressError

BY_COLUMN = ("input_ids", "position_ids", "cache_position")  # their last axis is the prompt's columns


def feed_in_chunks(decoder: PreTrainedModel, cache: CompressedCache) -> list[RemovableHandle]:
    """Run the prefill announced to `cache` through `decoder` in chunks of `prefill_chunk` tokens.

    Returns:
        The handles that undo this; none if the prompt is a single chunk.
    """
    size, whole = cache.policy.engine.prefill_chunk, cache.announced
    if whole.columns <= size:
        return []
    *stops, _ = range(whole.columns, 0, -size)[::-1]

    def feed(kwargs: dict) -> dict:
        start = 0
        for stop in stops:
            cache.begin(whole.columns_from(start, stop))
            decoder(**columns_of(kwargs, start, stop, whole.columns))
            start = stop
        cache.begin(whole.columns_from(start, whole.columns))
        return columns_of(kwargs, start, whole.columns, whole.columns)

    return [before_pass(decoder, feed)]


def before_pass(decoder: PreTrainedModel, feed: Callable[[dict], dict]) -> RemovableHandle:
    """Before a pass of the decoder, call `feed` with its arguments; the pass then runs with those that it returns.

    Passes that `feed` runs itself are unaffected."""
    is_nested = False
    names = list(inspect.signature(decoder.forward).parameters)

    def hook(decoder: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        nonlocal is_nested
        if is_nested:
            return None
        is_nested = True
        try:
            return (), feed(dict(zip(names, args, strict=False)) | kwargs)
        finally:
            is_nested = False

    return decoder.register_forward_pre_hook(hook, with_kwargs=True)


def columns_of(kwargs: dict, start: int, stop: int, columns: int) -> dict:
    """Return a text decoder's arguments for columns `start` to `stop` of a prompt of `columns`.

    Raises KVCompressError for a tensor argument that is not known."""
    part = {}
    for name, value in kwargs.items():
        if name in BY_COLUMN and value is not None:
            value = value[..., start:stop]
        elif name in ("inputs_embeds", "per_layer_inputs", "visual_pos_masks") and value is not None:
            value = value[:, start:stop]
        elif name == "attention_mask" and value is not None:
            if not isinstance(value, torch.Tensor) or value.ndim != 2:
                raise KVCompressError(
                    "prefill_chunk= and scope='context-first' need a 2-D attention mask (batch, tokens), left-padded, "
                    "or none: they cannot cut a 4-D mask, which models build if an image's tokens attend to each "
                    "other in both directions"
                )
            value = value[:, : value.shape[1] - columns + stop]
        elif name == "deepstack_visual_embeds" and value is not None:
            vision = kwargs["visual_pos_masks"]  # packed: one row of features per True
            inside = torch.zeros_like(vision)
            inside[:, start:stop] = True
            value = [features[inside[vision].to(features.device)] for features in value]
        elif isinstance(value, torch.Tensor):
            raise KVCompressError(
                f"prefill_chunk= and scope='context-first' cannot cut {name}=, which this model passes to its text "
                "decoder"
            )
        part[name] = value
    return part
