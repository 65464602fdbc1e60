"""What a forward pass rotates its queries by, read off the model's own rotary embedding."""

import inspect
import sys
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..errors import KVCompressError
from ..scoring.rotary import Rotary, rotate_half


def rotary_embeddings(decoder: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that compute cos and sin for a decoder's attention layers.

    Raises KVCompressError where there are none, where a layer goes without, or where the model pairs channels in
    another way than (i, i + half).
    """
    name = type(decoder).__name__
    modules = [module for key, module in decoder.named_modules() if key.split(".")[-1] == "rotary_emb"]
    if not modules:
        raise KVCompressError(f"{name} has no rotary position embedding: a method that foresees queries needs one")
    if any(getattr(module, "use_rope", True) in (False, 0) for module in decoder.modules()):
        raise KVCompressError(f"{name} has layers without rotary embedding: a method that foresees queries needs them")
    theirs = getattr(sys.modules[type(decoder).__module__], "rotate_half", None)
    probe = torch.arange(4.0)
    if theirs is None or not torch.equal(theirs(probe), rotate_half(probe)):
        raise KVCompressError(f"{name} rotates queries in a way that is not known: it cannot be undone")
    return modules


def watch_rotary(decoder: PreTrainedModel, receive: Callable[[Rotary], None]) -> list[RemovableHandle]:
    """Call `receive` in each forward pass of a decoder, before its first layer, with how its full attention layers
    are rotated, until the returned handles are removed. Raises as `rotary_embeddings`."""

    def after(module: torch.nn.Module, args: tuple, kwargs: dict, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        names = list(inspect.signature(module.forward).parameters)
        call = dict(zip(names, args, strict=False)) | kwargs
        layer_type = call.get("layer_type")
        if layer_type in (None, "full_attention"):
            states, positions = call[names[0]], call["position_ids"]
            receive(Rotary.of(decoder.config, module, states, positions, output, layer_type))

    return [module.register_forward_hook(after, with_kwargs=True) for module in rotary_embeddings(decoder)]
