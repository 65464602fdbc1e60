"""Where in a transformers model the parts are that compression connects to, whatever the family."""

from typing import Any

from transformers import PreTrainedModel

from ..errors import KVCompressError
from ..policy.policy import Policy, check_tensor_parallel


def check_heads(model: PreTrainedModel, config: Any, policy: Policy) -> None:
    """For a tensor-parallel model: raises KVCompressError unless each process has whole KV heads, and compresses them
    without the others. `config`: see `attention_config`."""
    if (processes := model.tp_size or 1) > 1:
        if config.num_key_value_heads % processes:
            raise KVCompressError(f"{config.num_key_value_heads} KV heads do not divide by {processes} processes")
        check_tensor_parallel(policy)


def writing_part(model: PreTrainedModel) -> PreTrainedModel:
    """The part whose forward pass writes text: of an omni model its thinker, of any other model all of it."""
    return getattr(model, "thinker", model)


def attention_config(model: PreTrainedModel) -> Any:
    """The config whose `_attn_implementation` the decoder's attention layers read. Raises as `text_decoder`."""
    return text_decoder(model).config


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The innermost decoder, the one that holds the attention layers.

    Raises KVCompressError where the decoder's attention does not go through the attention interface.
    """
    if not isinstance(model, PreTrainedModel):
        raise KVCompressError(f"a {type(model).__name__} is not a transformers model")
    config = model.config.get_text_config(decoder=True)
    decoders = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config]
    if not decoders or not all(type(decoder)._can_set_attn_implementation() for decoder in decoders):
        raise KVCompressError(
            f"{type(model).__name__} is not supported: its decoder's attention does not go through transformers' "
            "attention interface"
        )
    return decoders[-1]
