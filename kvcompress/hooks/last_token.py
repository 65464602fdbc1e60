"""`first_token="compressed"`: a prompt's last token is fed again, on the compressed cache."""

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..errors import KVCompressError
from ..policy.policy import Policy

OUTPUTS = ("output_attentions", "output_hidden_states", "return_dict")


def check_outputs(policy: Policy, inputs: dict[str, Any], columns: int) -> None:
    """Raise KVCompressError for labels of a prompt of so many columns, or for logits requested by position, if the
    model's output does not cover all columns."""
    size = policy.engine.prefill_chunk
    parts = {
        "first_token='compressed'": policy.feeds_last_again,
        "scope='context-first'": policy.engine.scope == "context-first",
        f"prefill_chunk={size}": size is not None and columns > size,
    }
    asked = {"labels": "labels=", "logits_to_keep": "places in logits_to_keep="}
    found = [what for name, what in asked.items() if isinstance(inputs.get(name), torch.Tensor)]
    for option, applies in parts.items():
        if applies and found:
            raise KVCompressError(
                f"{found[0]} do not go with {option}: the output is that of a prompt's last tokens alone"
            )


def record_last_position(decoder: PreTrainedModel, cache: CompressedCache) -> RemovableHandle:
    """Let a prompt's pass through `decoder` set `cache.last_position`, until the returned handle is removed."""
    cache.last_position = None

    def before_forward(decoder: PreTrainedModel, args: tuple, kwargs: dict) -> None:
        positions = kwargs.get("position_ids")
        if positions is not None and cache.last_position is None:  # further passes read parts of the prompt
            cache.last_position = positions[..., -1:]

    return decoder.register_forward_pre_hook(before_forward, with_kwargs=True)


def last_token(cache: CompressedCache, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, without the cache, that feed a prompt's last token again, given the prompt's own."""
    last = {"attention_mask": kwargs.get("attention_mask"), "use_cache": True}
    last |= {name: kwargs[name][:, -1:] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None}
    if cache.last_position is not None:
        last["position_ids"] = cache.last_position
    return last | {name: kwargs[name] for name in OUTPUTS if name in kwargs}
