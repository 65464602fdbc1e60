"""Finding the parts of a transformers model that compression connects to, for any family."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from ..cache_name import cache_in
from ..calibration.files import config_field
from ..errors import KVCompressError
from ..policy.conflicts import TENSOR_PARALLEL, check_conflicts
from ..policy.policy import Policy
from ..scoring.vision import vision_token_ids


def check_heads(model: PreTrainedModel, policy: Policy) -> None:
    """Raise KVCompressError if the processes of a tensor-parallel model cannot each compress their own KV heads."""
    if (processes := model.tp_size or 1) > 1:
        heads = text_decoder(model).config.num_key_value_heads
        if heads % processes:
            raise KVCompressError(f"{heads} KV heads are not divisible by {processes} processes")
        check_conflicts(policy, TENSOR_PARALLEL)


def check_whole_prompt(model: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """Raise KVCompressError if these options of `generate` split a prompt, whose pieces would be compressed as prompts
    of their own."""
    if generation_option(model, options, "prefill_chunk_size") is not None:
        raise KVCompressError(
            "prefill_chunk_size= would compress each piece of a prompt as a prompt of its own: give compress(...) "
            "prefill_chunk= instead"
        )


def check_use_cache(inputs: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raise KVCompressError if a forward pass with these arguments uses no cache; `config` is the decoder's."""
    use_cache, where = inputs.get("use_cache"), ""
    if use_cache is None and cache_in(inputs) is None:
        use_cache = config.use_cache
        where = (
            " in the model's config, as transformers' Trainer turns it off without TrainingArguments(use_cache=True)"
        )
    if use_cache is False:
        raise KVCompressError(f"use_cache is off{where}: without a KV cache there is nothing to compress")


def refuse_pages(*args: object, **kwargs: object) -> NoReturn:
    """Raise KVCompressError where transformers would make a manager of continuous batching."""
    raise KVCompressError(
        "continuous batching (generate_batch, cache_implementation='paged') stores keys in pages, which "
        "kvcompress.compress(...) does not compress: use kvcompress.paged.compress(...)"
    )


def generation_option(model: PreTrainedModel, options: Mapping[str, Any], name: str) -> Any:
    """Return the value that `generate` uses for an option: that of its arguments `options`, or else of the
    `generation_config` among them, or else of the model's."""
    if name in options:
        return options[name]
    configs = options.get("generation_config"), model.generation_config
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def unwrapped(model: torch.nn.Module) -> PreTrainedModel:
    """Return the transformers model that generates text, inside wrappers of `torch.compile` and PEFT.

    That is an omni model's thinker, and for a remote-code model whose `generate` calls a part's, that part. Raises
    KVCompressError for anything else, for PEFT's prompt learning, whose wrapper does more than call the model, and if
    several parts generate.
    """
    given = model
    while not isinstance(model, PreTrainedModel):
        if isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            for adapter in model.peft_config.values():
                if adapter.is_prompt_learning or adapter.is_adaption_prompt:
                    kind = getattr(adapter.peft_type, "value", adapter.peft_type)
                    raise KVCompressError(
                        f"PEFT's {kind} is not supported, because it adds a prompt of its own; weight adapters, "
                        "such as LoRA, are"
                    )
            model = model.get_base_model()
        else:
            inside = [name for name in ("module", "model") if isinstance(getattr(model, name, None), PreTrainedModel)]
            hint = f": pass the model inside it, its .{inside[0]}" if inside else ""
            raise KVCompressError(f"a {type(given).__name__} is not a transformers model{hint}")
    return _generating_part(getattr(model, "thinker", model))


def _generating_part(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part that generates in a remote-code model whose `generate` calls a part's, such as MiniCPM-o's `llm`.

    The forward of such a model is not called then. transformers' own models are returned unchanged, as their `generate`
    may call their forward.
    """
    generates = getattr(type(model), "generate", GenerationMixin.generate)
    of_transformers = generates.__module__.startswith("transformers.")
    inside = {} if of_transformers else dict(model.named_children())
    inside = {name: part for name, part in inside.items() if isinstance(part, GenerationMixin)}
    if len(inside) > 1:
        names = " or ".join(f".{name}" for name in inside)
        raise KVCompressError(f"{type(model).__name__} has several parts that generate: pass one of them, {names}")
    return next(iter(inside.values()), model)


def check_cache(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise KVCompressError unless a cache made for `config` fits the model."""
    if config is model.config:
        return
    theirs, ours = (what_a_cache_needs(each) for each in (config, model.config))
    if theirs != ours:
        raise KVCompressError(
            f"the CompressedCache was made for another model than this {type(model).__name__}: create it with this "
            "model's .config"
        )


def what_a_cache_needs(config: PreTrainedConfig) -> tuple:
    """Return a config's values about cache layers and their contents."""
    text = config.get_text_config(decoder=True)
    names = ("num_hidden_layers", "layer_types", "sliding_window", "num_key_value_heads", "cross_attention_layers")
    return config.model_type, vision_token_ids(config), *(config_field(text, name) for name in names)


def adapters_at_work(decoder: PreTrainedModel) -> list[tuple[str, ...]]:
    """Return the state of the adapters (LoRA and the like) in each module that has any."""
    names = ("active_adapters", "disable_adapters", "merged_adapters")
    modules = dict(decoder.named_modules())
    places = [key.removesuffix(".base_layer") for key in modules if key.endswith(".base_layer")]
    return [
        (key, *(str(getattr(modules[key], name)) for name in names if hasattr(modules[key], name))) for key in places
    ]


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the innermost decoder, which holds the attention layers; these read its config's `_attn_implementation`.

    Raises KVCompressError for an encoder-decoder model, or if the decoder's attention does not go through the attention
    interface.
    """
    if model.config.is_encoder_decoder:
        raise KVCompressError(
            f"{type(model).__name__} is not supported: it is an encoder-decoder model, whose prompt is not in the KV "
            "cache of its decoder"
        )
    config = model.config.get_text_config(decoder=True)
    decoders = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config]
    if not decoders or not all(type(decoder)._can_set_attn_implementation() for decoder in decoders):
        raise KVCompressError(
            f"{type(model).__name__} is not supported: its decoder's attention does not go through transformers' "
            "attention interface"
        )
    return decoders[-1]
