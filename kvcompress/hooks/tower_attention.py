"""The vision tower's attention to its patches, for token methods.

`generate` may encode images before it calls the model, so the recorder runs from the start of a session.
"""

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..device import own_dtypes
from ..errors import KVCompressError
from ..scoring.vision import video_token_mask, vision_token_mask, writes_lines
from ..tokens.base import TokenMethod, Tower
from .replacement import Replacement, wrapped

FAMILIES = ("llava", "llava_next", "llava_onevision")  # an image token is a patch of the tower, or a mean of some
VIDEO_FAMILIES = ("llava_onevision",)


class TowerRecorder:
    """Records one vision tower layer's attention and the projector's input whenever the model encodes images.

    The numbers are packed for the prompt's tokens just as the model packs the patches' features (cutting off padding,
    interpolating, adding a newline after each line of patches).
    """

    def __init__(self, model: PreTrainedModel, method: TokenMethod):
        """Find the tower's layer `method.tower_layer`. Raises KVCompressError if the tower is not accessible."""
        layer = method.tower_layer
        kind = "pixtral" if writes_lines(model.config) else model.config.model_type
        families, shown = (VIDEO_FAMILIES, " to videos") if method.sees == "video" else (FAMILIES, "")
        if kind not in families:
            raise KVCompressError(
                f"there is no access to the vision tower's attention{shown} of a {kind} model; "
                f"there is for {', '.join(families)}"
            )
        self.model = model.base_model
        attentions = [
            module
            for module in self.model.vision_tower.modules()
            if hasattr(module, "q_proj") and hasattr(module, "k_proj")
        ]
        if not -len(attentions) <= layer < len(attentions):
            raise KVCompressError(f"tower_layer={layer}: the vision tower has {len(attentions)} layers")
        self.attention, self.method = attentions[layer], method
        self.states = self.output = self.packed = None

    def attach(self) -> list[RemovableHandle | Replacement]:
        """Start recording; return the handles that end it."""
        handles = [
            self.attention.register_forward_pre_hook(self._attending, with_kwargs=True),
            self.model.vision_tower.register_forward_hook(self._encoded),
            self.model.multi_modal_projector.register_forward_hook(self._projected),
        ]
        if self.method.sees == "video":
            handles.append(wrapped(self.model, "get_video_features", self._encoding_videos))
        if hasattr(self.model, "pack_image_features"):
            handles.append(wrapped(self.model, "pack_image_features", self._packing))
        return handles

    def take(self, input_ids: torch.Tensor) -> dict[str, Tower]:
        """Return the record as `tower` of `Tokens`, for a prompt (batch, columns); beam search repeats each row."""
        images = video_token_mask(self.model.config, input_ids)  # encoded behind the images, which stay beside a video
        is_video = self.method.sees == "video" and bool(images.any())
        images = images if is_video else vision_token_mask(self.model.config, input_ids)
        packed, self.packed = self.packed, None
        tokens, given = int(images.sum()), 0 if packed is None else sum(packed.lengths)
        beams = tokens // given if given else 0
        if not beams or tokens != given * beams:
            kind, needed = ("video", "a video") if self.method.sees == "video" else ("vision", "images (no video)")
            raise KVCompressError(
                f"the prompt has {tokens} {kind} tokens and the vision tower encoded {given}: the method needs "
                f"{needed}, encoded in the same kvcompress.compress(...)"
            )
        first = images[::beams]

        def by_row(numbers: torch.Tensor, elsewhere: float) -> torch.Tensor:
            rows = numbers.new_full((*first.shape, *numbers.shape[1:]), elsewhere, device=images.device)
            rows[first] = numbers.to(images.device)
            return rows.repeat_interleave(beams, 0)

        parts = by_row(packed.received, float("-inf")), by_row(packed.keys, 0.0), by_row(packed.features, 0.0)
        classes = [row for row in packed.classes_of(first.sum(1).tolist()) for _ in range(beams)]
        kind = images.device.type  # a method is called without autocast, and the projector runs as in the model
        as_here = torch.autocast(kind, enabled=torch.is_autocast_enabled(kind))
        return {"tower": Tower(*parts, classes, as_here(self.model.multi_modal_projector.forward))}

    def _attending(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        self.states = args[0] if args else kwargs["hidden_states"]

    def _encoded(self, tower: torch.nn.Module, args: tuple, output: object) -> None:
        self.output = output

    @torch.no_grad()
    def _projected(self, projector: torch.nn.Module, args: tuple, projected: torch.Tensor) -> None:
        """Record tiles whose features `args[0]` (tiles, patches, size) were projected."""
        (features,), states, output = args, self.states, self.output
        self.states = self.output = None
        heads = self.attention.num_heads
        queries, keys = (
            project(states).unflatten(-1, (heads, -1)) for project in (self.attention.q_proj, self.attention.k_proj)
        )
        has_class = features.shape[1] == states.shape[1] - 1  # the model does not use its features
        classes = features[:, :0]
        if has_class:
            layers = self.model.config.vision_feature_layer
            layers = [layers] if isinstance(layers, int) else layers
            classes = torch.cat([output.hidden_states[layer][:, :1] for layer in layers], -1)
        with own_dtypes(features.device):
            received = [self.method.received(q, k, has_class) for q, k in zip(queries, keys, strict=True)]
        numbers = torch.stack(received)[..., None], keys[:, int(has_class) :], features
        self.packed = Packed(*numbers, classes, [1] * len(features), [features.shape[1]] * len(features))
        if not hasattr(self.model, "pack_image_features"):
            self.packed = self.packed.packed_by(lambda numbers, _: list(numbers), self.packed.tiles)

    def _packing(self, pack: Callable, features: list[torch.Tensor], *args, **kwargs):
        """Pack the numbers as the model packs the features; newlines receive no attention (-inf)."""
        counts = [len(tiles) for tiles in features]

        def packed(numbers: torch.Tensor, newline: float) -> list[torch.Tensor]:
            newline = numbers.new_full((numbers.shape[-1],), newline)
            parts, _ = pack(numbers.split(counts), *args, **{**kwargs, "image_newline": newline})
            return parts

        self.packed = self.packed.packed_by(packed, counts)
        return pack(features, *args, **kwargs)

    def _encoding_videos(self, encode: Callable, *args, **kwargs):
        """Pool the numbers as the model pools the features; the newline after a video receives no attention."""
        given = inspect.signature(encode).bind(*args, **kwargs).arguments
        videos, frames = next(iter(given.values())).shape[:2]  # of the pixels, an argument that was renamed
        output = encode(*args, **kwargs)

        def pooled(numbers: torch.Tensor, newline: float) -> list[torch.Tensor]:
            tokens = self.model.apply_pooling(numbers).reshape(videos, -1, numbers.shape[-1])
            return list(F.pad(tokens, (0, 0, 0, 1), value=newline))

        self.packed = self.packed.packed_by(pooled, [frames] * videos)
        return output


@dataclass(frozen=True)
class Packed:
    """The record of all patches: first by tile, then in the order of the prompt.

    Attributes:
        received, keys, features: see `Tower`; (tiles, patches, ...), then (tokens, ...).
        classes: the class tokens' states (tiles, 1 or 0, size).
        tiles, lengths: number of tiles and tokens of each image.
    """

    received: torch.Tensor
    keys: torch.Tensor
    features: torch.Tensor
    classes: torch.Tensor
    tiles: list[int]
    lengths: list[int]

    def packed_by(self, pack: Callable[[torch.Tensor, float], list[torch.Tensor]], tiles: list[int]) -> "Packed":
        """Pack the record with `pack`.

        It maps numbers (tiles, patches, size) and the newlines' value to one tensor per image."""
        received = pack(self.received, float("-inf"))
        keys = torch.cat(pack(self.keys.flatten(2), 0.0)).unflatten(-1, self.keys.shape[2:])
        features, lengths = torch.cat(pack(self.features, 0.0)), [len(image) for image in received]
        return Packed(torch.cat(received)[:, 0], keys, features, self.classes, tiles, lengths)

    def classes_of(self, tokens: list[int]) -> list[torch.Tensor]:
        """Return each row's class token states (classes, size), given the number of image tokens in each row."""
        rows, images = [], deque(zip(self.classes.split(self.tiles), self.lengths, strict=True))
        for left in tokens:
            of_row = [self.classes[:0].flatten(0, 1)]
            while left > 0:
                classes, length = images.popleft()
                of_row.append(classes.flatten(0, 1))
                left -= length
            rows.append(torch.cat(of_row))
        return rows
