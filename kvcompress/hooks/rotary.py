"""The rotation of a forward pass, read from the model's own rotary embedding."""

import inspect
import re
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..errors import KVCompressError
from ..scoring.rotary import Pairs, Rotary, interleaved, rotate_half

# A rotation inside an `if` that asks whether the attention has a window.
ROTATED_WINDOWS = re.compile(
    r"^( *)if self\.(?:sliding_window|is_sliding|is_local_attention)\b.*:\n(?:\1 +.*\n)*?\1 +.*apply_rotary",
    re.MULTILINE,
)


def rotary_embeddings(decoder: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules that compute cos and sin for a decoder's attention layers.

    Raises KVCompressError if there are none, if a layer has no rotation or another one than the rest, or if the model's
    pairs of channels are unknown.
    """
    name = type(decoder).__name__
    modules = [module for key, module in decoder.named_modules() if key.split(".")[-1] == "rotary_emb"]
    if not modules:
        raise KVCompressError(f"{name} has no rotary position embedding: methods that rotate keys or queries need one")
    if _has_unrotated_layers(decoder):
        raise KVCompressError(
            f"{name} has layers without rotary embedding: methods that rotate keys or queries need it"
        )
    bases = getattr(decoder.config, "layer_rope_theta", None) or ()
    if len(set(getattr(decoder, "rope_types", ()))) > 1 or len(set(bases)) > 1:
        raise KVCompressError(f"{name} rotates layers in several ways: methods that rotate keys or queries need one")
    channel_pairs(decoder)
    return modules


def _has_unrotated_layers(decoder: PreTrainedModel) -> bool:
    """Return whether a layer does not rotate, by its attributes or, where only layers with windows rotate (Cohere 2,
    EXAONE 4), by its code."""
    if any(getattr(module, "use_rope", True) in (False, 0) for module in decoder.modules()):
        return True
    if 0 in (getattr(decoder.config, "layer_rope_theta", None) or ()):
        return True
    kinds = getattr(decoder.config, "layer_types", None) or ()
    classes = {type(module) for module in decoder.modules() if hasattr(module, "layer_idx")}
    return "sliding_attention" in kinds and any(ROTATED_WINDOWS.search(inspect.getsource(each)) for each in classes)


def channel_pairs(decoder: PreTrainedModel) -> Pairs:
    """Return the channels that a decoder rotates together. Raises KVCompressError if they are unknown."""
    module = sys.modules[type(decoder).__module__]
    pairs = _detect_pairs(getattr(module, "apply_rotary_pos_emb", None), getattr(module, "rotate_half", None))
    if pairs is None:
        name = type(decoder).__name__
        raise KVCompressError(f"{name} rotates queries in an unknown way, which cannot be undone")
    return pairs


@cache
def _detect_pairs(apply: Callable | None, rotate: Callable | None) -> Pairs | None:
    """Find the pairs by applying a modelling file's `apply_rotary_pos_emb`, or else its `rotate_half`, to two pairs."""
    states, angles = torch.arange(1.0, 5), torch.tensor([5.0, 7, 5, 7])  # the angles of two pairs in the usual order
    names = [] if apply is None else list(inspect.signature(apply).parameters)
    count = names.index("cos") if "cos" in names else 0  # of its rotated arguments: queries and keys, or one
    if count and names[count + 1 : count + 2] == ["sin"]:
        try:
            turned = apply(*[states[None, None, None]] * count, torch.zeros(1, 1, 4), angles[None, None])
        except RuntimeError:  # it takes cos and sin of another shape (gpt-oss)
            return None
        turned = (turned if isinstance(turned, torch.Tensor) else turned[0]).flatten()
    elif rotate is not None:
        turned = rotate(states) * angles
    else:
        return None
    neighbours = torch.tensor([-2.0, 1, -4, 3])
    for pairs, expected in (
        (Pairs(), rotate_half(states) * angles),
        (Pairs(are_interleaved=True), neighbours * interleaved(angles)),
        (Pairs(are_interleaved=True, angles_interleaved=True), neighbours * angles),
    ):
        if torch.equal(turned, expected):
            return pairs
    return None


def watch_rotary(decoder: PreTrainedModel, receive: Callable[[Rotary], None]) -> list[RemovableHandle]:
    """Call `receive` with the rotation of the full attention layers, before the first layer of each forward pass.

    This lasts until the returned handles are removed. Raises like `rotary_embeddings`."""
    modules, pairs = rotary_embeddings(decoder), channel_pairs(decoder)

    def after(module: torch.nn.Module, args: tuple, kwargs: dict, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        names = list(inspect.signature(module.forward).parameters)
        call = dict(zip(names, args, strict=False)) | kwargs
        layer_type = call.get("layer_type")
        if layer_type in (None, "full_attention"):
            states, positions = call[names[0]], call["position_ids"]
            receive(Rotary.of(decoder.config, module, states, positions, output, layer_type, pairs))

    return [module.register_forward_hook(after, with_kwargs=True) for module in modules]
