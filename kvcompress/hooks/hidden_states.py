"""The hidden states that enter each attention layer, for learned methods."""

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..errors import KVCompressError
from ..inflight.cache import SlotCache


def watch_hidden_states(decoder: PreTrainedModel, cache: CompressedCache | SlotCache) -> list[RemovableHandle]:
    """Let the method of `cache` predict scores from hidden states in each forward pass of `decoder`.

    Every compressed layer takes them in place of its queries, until the returned handles are removed. Raises
    KVCompressError if the attention layers are not found."""
    modules = attention_layers(decoder)
    layers = {layer.layer_idx: layer for layer in cache.layers if hasattr(layer, "set_features")}
    if missing := sorted(layers.keys() - modules.keys()):
        raise KVCompressError(
            f"method {cache.policy.method!r} reads the hidden states that enter attention layers: those of "
            f"{type(decoder).__name__}'s layers {missing} are not found"
        )

    def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        with torch.no_grad():
            features = cache.policy.cluster.hidden_features(hidden, module.layer_idx)
        layers[module.layer_idx].set_features(features)

    return [modules[index].register_forward_pre_hook(before, with_kwargs=True) for index in layers]


def attention_layers(decoder: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """Map layer index to attention module, for modules that project their output with an `o_proj`."""
    found = {}
    for module in decoder.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "o_proj"):
            found[module.layer_idx] = module
    return found
