"""The hidden states that enter each attention layer, for learned methods."""

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..device import own_dtypes
from ..errors import KVCompressError
from ..inflight.cache import SlotCache


def watch_hidden_states(decoder: PreTrainedModel, cache: CompressedCache | SlotCache) -> list[RemovableHandle]:
    """Let the method of `cache` predict scores from hidden states in each forward pass of `decoder`.

    Every compressed layer takes them in place of its queries, until the returned handles are removed. Raises
    KVCompressError if the attention layers are not found."""
    layers = {layer.layer_idx: layer for layer in cache.layers if hasattr(layer, "set_features")}
    if missing := sorted(layers.keys() - attention_layers(decoder).keys()):
        raise KVCompressError(
            f"method {cache.policy.method!r} reads the hidden states that enter attention layers: those of "
            f"{type(decoder).__name__}'s layers {missing} are not found"
        )

    def predict(layer_idx: int, hidden: torch.Tensor) -> None:
        if layer_idx in layers:
            with torch.no_grad(), own_dtypes(hidden.device):
                features = cache.policy.cluster.hidden_features(hidden, layer_idx)
            layers[layer_idx].set_features(features)

    return watch_inputs(decoder, predict)


def watch_inputs(decoder: PreTrainedModel, receive: Callable[[int, torch.Tensor], None]) -> list[RemovableHandle]:
    """Call `receive(layer_idx, hidden)` with the hidden states (batch, tokens, hidden_size) that enter each attention
    layer, until the returned handles are removed."""

    def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        receive(module.layer_idx, args[0] if args else kwargs["hidden_states"])

    modules = attention_layers(decoder).values()
    return [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]


def attention_layers(decoder: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """Map layer index to attention module, for modules that project their output with an `o_proj`."""
    found = {}
    for module in decoder.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "o_proj"):
            found[module.layer_idx] = module
    return found
