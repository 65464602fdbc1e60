"""Which patches the vision tower attends to, for token methods.

`generate` may encode images before it calls the model, so this watches from the start of a session.
"""

import functools
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..errors import KVCompressError
from ..scoring.vision import vision_token_mask
from ..tokens.base import Tower

FAMILIES = ("llava", "llava_next", "llava_onevision")  # an image token is a patch of the tower, or a mean of some


class TowerRecorder:
    """Notes, whenever the model encodes images, what one layer of the vision tower attends to.

    Each token of the prompt gets its numbers as the model packs them: what the model does with the patches' features
    (cut off the padding, interpolate, put a newline behind each line of patches) is done with these numbers too.
    """

    def __init__(self, model: PreTrainedModel, layer: int):
        """`layer`: of the tower, as an index into its layers. Raises KVCompressError where the tower is not seen."""
        if model.config.model_type not in FAMILIES:
            raise KVCompressError(
                f"there is no access to the vision tower's attention of a {model.config.model_type} model; "
                f"there is for {', '.join(FAMILIES)}"
            )
        self.model = model.base_model
        attentions = [
            module
            for module in self.model.vision_tower.modules()
            if hasattr(module, "q_proj") and hasattr(module, "k_proj")
        ]
        if not -len(attentions) <= layer < len(attentions):
            raise KVCompressError(f"tower_layer={layer}: the vision tower has {len(attentions)} layers")
        self.attention = attentions[layer]
        self.states = self.received = self.keys = None

    def attach(self) -> list["RemovableHandle | Replacement"]:
        """Start watching; returns what ends it."""
        handles = [
            self.attention.register_forward_pre_hook(self._attending, with_kwargs=True),
            self.model.multi_modal_projector.register_forward_hook(self._projected),
        ]
        if hasattr(self.model, "pack_image_features"):
            handles.append(Replacement(self.model, "pack_image_features", self._packing))
        return handles

    def take(self, input_ids: torch.Tensor) -> dict[str, Tower]:
        """What was noted, as `tower` of `Tokens`, for a prompt (batch, columns); beam search repeats each row."""
        images = vision_token_mask(self.model.config, input_ids)
        received, keys, self.received, self.keys = self.received, self.keys, None, None
        tokens, given = int(images.sum()), 0 if received is None else len(received)
        beams = tokens // given if given else 0
        if not beams or tokens != given * beams:
            raise KVCompressError(
                f"the prompt has {tokens} vision tokens and the vision tower encoded images for {given}: such a method "
                "needs images (no video), encoded in the same kvcompress.compress(...)"
            )
        first = images[::beams]
        at_tokens = torch.full(first.shape, float("-inf"), device=images.device)
        at_tokens[first] = received.to(images.device)
        all_keys = keys.new_zeros(*first.shape, *keys.shape[1:], device=images.device)
        all_keys[first] = keys.to(images.device)
        return {"tower": Tower(at_tokens.repeat_interleave(beams, 0), all_keys.repeat_interleave(beams, 0))}

    def _attending(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        self.states = args[0] if args else kwargs["hidden_states"]

    @torch.no_grad()
    def _projected(self, projector: torch.nn.Module, args: tuple, features: torch.Tensor) -> None:
        """The tower is done with tiles of which the model uses `features` (tiles, patches, size)."""
        states, self.states = self.states, None
        heads = self.attention.num_heads
        queries, keys = (
            project(states).unflatten(-1, (heads, -1)) for project in (self.attention.q_proj, self.attention.k_proj)
        )
        has_class = features.shape[1] == states.shape[1] - 1  # whose own features the model does not use
        received = [received_attention(q, k, has_class) for q, k in zip(queries, keys, strict=True)]
        self.received, self.keys = torch.stack(received)[..., None], keys[:, int(has_class) :]
        if not hasattr(self.model, "pack_image_features"):
            self.received, self.keys = self.received.flatten(), self.keys.flatten(0, 1)

    def _packing(self, pack: Callable, features: list[torch.Tensor], *args, **kwargs):
        """Pack the numbers as the model packs the features; newlines receive nothing (-inf)."""
        counts = [len(tiles) for tiles in features]

        def packed(numbers: torch.Tensor, newline: float) -> torch.Tensor:
            newline = numbers.new_full((numbers.shape[-1],), newline)
            parts, _ = pack(numbers.split(counts), *args, **{**kwargs, "image_newline": newline})
            return torch.cat(parts)

        keys = self.keys.flatten(2)
        self.received, self.keys = (
            packed(self.received, float("-inf"))[:, 0],
            packed(keys, 0.0).unflatten(-1, self.keys.shape[2:]),
        )
        return pack(features, *args, **kwargs)


def received_attention(queries: torch.Tensor, keys: torch.Tensor, has_class: bool) -> torch.Tensor:
    """What each patch of a tile receives, averaged over the heads: from the class token, which comes first, or where
    the tower has none from all patches in the mean. queries, keys (tokens, heads, head_dim); the result, in fp32, is
    (patches,) and sums to at most 1."""
    asking = queries[:1] if has_class else queries
    logits = torch.einsum("qhd,khd->hqk", asking.float(), keys.float()) * queries.shape[-1] ** -0.5
    return logits.softmax(-1).mean((0, 1))[int(has_class) :]


class Replacement:
    """A module's method replaced by `wrapper(method, *args, **kwargs)` until `remove`."""

    def __init__(self, module: torch.nn.Module, name: str, wrapper: Callable):
        self.module, self.name = module, name
        method = getattr(module, name)
        # `generate` reads the signature.
        setattr(module, name, functools.wraps(method)(functools.partial(wrapper, method)))

    def remove(self) -> None:
        delattr(self.module, self.name)
