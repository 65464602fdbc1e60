"""What a token method sees of the vision side: which patches the vision tower attends to, where a video's frames are.

`generate` may encode images and videos before it calls the model, so these watch from the start of a session.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from .errors import KVCompressError
from .tokens.base import Tower
from .vision import vision_token_mask

FAMILIES = ("llava", "llava_next", "llava_onevision")  # an image token is a patch of the tower, or a mean of some


class TowerWatch:
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

    def attach(self) -> list["RemovableHandle | _Replacement"]:
        """Start watching; returns what ends it."""
        handles = [
            self.attention.register_forward_pre_hook(self._attending, with_kwargs=True),
            self.model.multi_modal_projector.register_forward_hook(self._projected),
        ]
        if hasattr(self.model, "pack_image_features"):
            handles.append(_Replacement(self.model, "pack_image_features", self._packing))
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


class FrameWatch:
    """Notes, whenever the model encodes videos, how many frames and tokens each has.

    A model that takes the frames of a video as images (InternVL) does not say which images are frames: those of a row
    that have as many tokens as its first are.

    Attributes:
        videos: (frames, tokens per frame, tokens behind the last) of each video that was encoded.
        grids: their `video_grid_thw` (videos, 3), for a model that takes one.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.videos, self.grids = model.base_model, [], None
        encode = getattr(self.model, "get_video_features", None)
        self.frames_are_images = encode is None
        self.has_grid = encode is not None and "video_grid_thw" in inspect.signature(encode).parameters
        self.is_pooled = model.config.model_type == "llava_onevision"

    def attach(self) -> list["_Replacement"]:
        """Start watching; returns what ends it."""
        if not (self.has_grid or self.is_pooled):
            return []
        return [_Replacement(self.model, "get_video_features", self._encoding)]

    def grid(self, input_ids: torch.Tensor | None) -> torch.Tensor | None:
        """The `video_grid_thw` of a prompt (batch, columns), which `generate` does not give to the model where it has
        encoded the videos before; None where none is known."""
        if self.grids is None or input_ids is None:
            return None
        rows = self._by_row(self._is_video(input_ids))
        return None if rows is None else self.grids[[video for row in rows for video in row]]

    def take(self, input_ids: torch.Tensor) -> dict[str, list[list[torch.Tensor]]]:
        """`frames` of `Tokens` for a prompt (batch, columns)."""
        if self.frames_are_images:
            return {"frames": [_equal_spans(row) for row in vision_token_mask(self.model.config, input_ids)]}
        is_video = self._is_video(input_ids)
        rows = self._by_row(is_video)
        if rows is None:
            raise KVCompressError(
                f"it is not known how this {self.model.config.model_type} model laid out the prompt's "
                f"{int(is_video.sum())} video tokens: they must be encoded in the same kvcompress.compress(...)"
            )
        frames = []
        for row, videos in zip(is_video, rows, strict=True):
            columns, of_row = row.nonzero()[:, 0], []
            for count, size, rest in (self.videos[video] for video in videos):
                of_row.append(columns[: count * size].view(count, size))
                columns = columns[count * size + rest :]
            frames.append(of_row)
        return {"frames": frames}

    def _is_video(self, input_ids: torch.Tensor) -> torch.Tensor:
        config = self.model.config
        return input_ids == getattr(config, "video_token_id", getattr(config, "video_token_index", None))

    def _by_row(self, is_video: torch.Tensor) -> list[list[int]] | None:
        """Which of the encoded videos each row of a prompt (batch, columns) holds; beam search repeats each row. None
        where they are not the prompt's."""
        counts = is_video.sum(1).tolist()
        sizes = [count * size + rest for count, size, rest in self.videos]
        beams = max(sum(counts) // sum(sizes), 1) if sizes else 1
        rows, video = [], 0
        for left in counts[::beams]:
            of_row = []
            while left > 0 and video < len(sizes):
                of_row.append(video)
                left, video = left - sizes[video], video + 1
            if left:
                return None
            rows += [of_row] * beams
        return rows

    def _encoding(self, encode: Callable, *args, **kwargs):
        given = inspect.signature(encode).bind(*args, **kwargs).arguments
        vision = self.model.config.vision_config
        if self.has_grid:  # frames, and rows and columns of patches
            self.grids, merged = given["video_grid_thw"], vision.spatial_merge_size**2
            self.videos = [(frames, height * width // merged, 0) for frames, height, width in self.grids.tolist()]
        else:  # videos of equal length, patches pooled 2 x 2, a newline at the end of each video
            videos, frames = next(iter(given.values())).shape[:2]  # of the pixels, whose name has changed
            side = vision.image_size // vision.patch_size
            self.videos = [(frames, ((side + 1) // 2) ** 2, 1)] * videos
        return encode(*args, **kwargs)


def _equal_spans(vision: torch.Tensor) -> list[torch.Tensor]:
    """The contiguous spans of vision tokens (columns,) that are as long as the first: one tensor (spans, length)."""
    columns = vision.nonzero()[:, 0]
    if not len(columns):
        return []
    ends = (columns.diff() > 1).nonzero()[:, 0] + 1
    spans = columns.tensor_split(ends.cpu())
    return [torch.stack([span for span in spans if len(span) == len(spans[0])])]


def received_attention(queries: torch.Tensor, keys: torch.Tensor, has_class: bool) -> torch.Tensor:
    """What each patch of a tile receives, averaged over the heads: from the class token, which comes first, or where
    the tower has none from all patches in the mean. queries, keys (tokens, heads, head_dim); the result, in fp32, is
    (patches,) and sums to at most 1."""
    asking = queries[:1] if has_class else queries
    logits = torch.einsum("qhd,khd->hqk", asking.float(), keys.float()) * queries.shape[-1] ** -0.5
    return logits.softmax(-1).mean((0, 1))[int(has_class) :]


class _Replacement:
    """A module's method replaced by `wrapper(method, *args, **kwargs)` until `remove`."""

    def __init__(self, module: torch.nn.Module, name: str, wrapper: Callable):
        self.module, self.name = module, name
        method = getattr(module, name)
        # `generate` reads the signature.
        setattr(module, name, functools.wraps(method)(functools.partial(wrapper, method)))

    def remove(self) -> None:
        delattr(self.module, self.name)
