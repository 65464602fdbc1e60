"""Observe, or replace, what the attention layers of an unmodified model do."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import KVCompressError
from ..hooks.attention import has_plain_weights, register, run_base
from ..hooks.hidden_states import attention_layers, watch_inputs
from ..hooks.replacement import Replacement

NAME = "kvcompress_train"
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@contextmanager
def attention_by(decoder: PreTrainedModel, function: Attend) -> Iterator[None]:
    """Context manager in which the decoder's attention layers call `function(attend, module, query, key, value, ...)`.

    Arguments and results are those of transformers' attention functions; `attend` is the model's own."""
    base = decoder.config._attn_implementation

    def call(module: torch.nn.Module, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not has_plain_weights(kwargs):
            raise KVCompressError(
                f"training needs plain attention weights, but a {type(module).__name__} caps or shifts its own"
            )
        return function(partial(run_base, base), module, *args, **kwargs)

    register(NAME, call, base)
    decoder.config._attn_implementation = NAME
    try:
        yield
    finally:
        decoder.config._attn_implementation = base


@contextmanager
def hidden_states(decoder: PreTrainedModel) -> Iterator[dict[int, torch.Tensor]]:
    """Context manager that notes what enters each attention layer: index -> (tokens, hidden_size), of one row."""
    seen: dict[int, torch.Tensor] = {}

    def note(index: int, hidden: torch.Tensor) -> None:
        seen[index] = hidden[0]

    with ExitStack() as hooks:
        for hook in watch_inputs(decoder, note):
            hooks.enter_context(hook)
        yield seen


@contextmanager
def computed_again(decoder: PreTrainedModel) -> Iterator[None]:
    """Context manager in which a backward pass computes each decoder layer again, so that only its input is kept."""
    attentions = set(attention_layers(decoder).values())
    with ExitStack() as replaced:
        for module in decoder.modules():
            if isinstance(module, GradientCheckpointingLayer) or attentions & set(module.children()):
                forward = partial(checkpoint, module.forward, use_reentrant=False)
                replaced.enter_context(Replacement(module, "forward", forward))
        yield
