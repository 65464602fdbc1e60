"""`first_token="compressed"`: a prompt's last token is fed again, on the compressed cache."""

from typing import Any

from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..errors import KVCompressError

OUTPUTS = ("output_attentions", "output_hidden_states", "return_dict")


def check_no_labels(kwargs: dict[str, Any]) -> None:
    """Raise KVCompressError if a prompt's forward pass should return a loss, which one token does not have."""
    if kwargs.get("labels") is not None:
        raise KVCompressError(
            "labels= need first_token='full': with first_token='compressed' the model's output is that of a prompt's "
            "last token alone, which has no loss"
        )


def note_last_position(decoder: PreTrainedModel, cache: CompressedCache) -> RemovableHandle:
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
