"""Where the image and video tokens of a prompt are."""

from typing import TYPE_CHECKING

import torch

from ..device import on_device
from .layer_view import LayerView

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RECENT_QUERIES = 32  # observe where no image says where the question begins
VIDEO_ID_NAMES = ("video_token_id", "video_token_index")
DECODED_QUERIES = 16  # observe while decoding


def vision_token_ids(config: "PreTrainedConfig") -> list[int]:
    """The placeholder ids of image and video tokens in `input_ids`, empty for a text-only model."""
    names = ("image_token_id", "image_token_index", *VIDEO_ID_NAMES)
    return sorted({value for name in names if (value := getattr(config, name, None)) is not None})


def vision_token_mask(config: "PreTrainedConfig", input_ids: torch.Tensor) -> torch.Tensor:
    """True at image and video tokens: bool (batch, columns). There may be several spans or none."""
    return torch.isin(input_ids, on_device(vision_token_ids(config), input_ids.device, input_ids.dtype))


def frame_tokens(
    config: "PreTrainedConfig", input_ids: torch.Tensor, video_grid_thw: torch.Tensor | None
) -> tuple[int, ...]:
    """How many vision tokens each frame has, per row of `input_ids` (of the host); 0 where that is unknown.

    Known are: videos of the Qwen-VL family, from the `video_grid_thw` (videos, 3) that their processor gives; the
    video of LLaVA-OneVision and LLaVA-NeXT-Video, from the config; of Gemma 4, from the spans; and rows with several
    spans of vision tokens of one length, each of which is a frame (InternVL, GLM-4.1V; also several images of one
    size). Where a row's frames differ in size, or where images stand beside its video, they are unknown; so they are
    in models that write an image as several spans (Pixtral, Mistral 3, Molmo 2).
    """
    vision = vision_token_mask(config, input_ids)
    video_ids = [value for name in VIDEO_ID_NAMES if (value := getattr(config, name, None)) is not None]
    is_video = torch.isin(input_ids, torch.tensor(video_ids, dtype=input_ids.dtype))
    videos = [] if video_grid_thw is None else _grid_sizes(config, video_grid_thw)
    result = []
    for row, of_video in zip(vision, is_video.sum(1).tolist(), strict=True):
        kinds, lengths = row.unique_consecutive(return_counts=True)
        spans, sizes, left = lengths[kinds].tolist(), set(), of_video
        while left > 0 and videos:
            frames, size = videos.pop(0)
            sizes.add(size)
            left -= frames * size
        if of_video != sum(spans):  # images, alone or beside a video
            sizes = set(spans) if not of_video and len(spans) > 1 and not writes_lines(config) else set()
        elif config.model_type == "gemma4":
            sizes = set(spans)
        elif config.model_type in ("llava_onevision", "llava_next_video") and len(spans) == 1:
            side = config.vision_config.image_size // config.vision_config.patch_size
            if config.model_type == "llava_onevision":
                sizes = {((side + 1) // 2) ** 2}  # pooled 2 x 2, the last row and column too
            else:
                sizes = {(side // config.spatial_pool_stride) ** 2}
        result.append(sizes.pop() if len(sizes) == 1 else 0)
    return tuple(result)


def writes_lines(config: "PreTrainedConfig") -> bool:
    """Whether each line of patches of an image is a span of vision tokens of its own (Pixtral, Mistral 3)."""
    return getattr(getattr(config, "vision_config", None), "model_type", None) == "pixtral"


def _grid_sizes(config: "PreTrainedConfig", video_grid_thw: torch.Tensor) -> list[tuple[int, int]]:
    """Frames, and tokens per frame, of each video."""
    merged = config.vision_config.spatial_merge_size**2
    return [(frames, height * width // merged) for frames, height, width in video_grid_thw.tolist()]


def observer_queries(view: LayerView, keys: torch.Tensor, fallback: int = RECENT_QUERIES) -> torch.Tensor:
    """The queries that ask about the images: the tokens behind each row's last vision token. bool (batch, columns).

    A row without vision tokens, or with none behind the last one, is observed by its last `fallback` real tokens;
    so is every row where vision tokens are unknown. `keys`: (batch, kv_heads, columns, head_dim).
    """
    columns = keys.shape[2]
    first = columns - on_device(view.lengths, keys.device).clamp(max=fallback)
    if view.vision is not None:
        behind = view.vision.flip(1).int().argmax(1)  # columns behind the last vision token
        first = torch.where(view.vision.any(1) & (behind > 0), columns - behind, first)
    return torch.arange(columns, device=keys.device) >= first[:, None]


def question_attention(queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
    """What each key receives from `observer_queries`, while decoding from the recent queries at hand: sums over the
    queries, averaged over the query heads of a KV head. (batch, kv_heads, keys); arguments as in `KVCluster.score`."""
    observers = None if view.is_decoding else observer_queries(view, keys)
    return view.column_sums(queries, keys, observers)


def elite_attention(queries: torch.Tensor, keys: torch.Tensor, view: LayerView, alpha: float) -> torch.Tensor:
    """What each key of a prompt receives from the elite queries, on average (AirCache): of the observers
    those that the last query, mean over the heads, attends to with at least `alpha` of the most, where it attends to
    observers only (equation 4).

    A vision token's part is of the attention to vision tokens and elite only, a text token's of all attention.
    (batch, kv_heads, keys), averaged over the query heads of a KV head.
    """
    observers = observer_queries(view, keys)
    last = view.window_logits(queries, keys, 1)[..., 0, :].masked_fill(~observers[:, None, None], float("-inf"))
    last = last.softmax(-1).mean((1, 2))
    elite = observers & (last >= alpha * last.amax(1, keepdim=True))
    vision = torch.zeros_like(elite) if view.vision is None else view.vision
    first = int(observers.any(0).int().argmax())
    sums = torch.zeros(keys.shape[:3], device=keys.device)
    for rows, weights in view.attention_blocks(queries, keys, first):
        at_vision = vision[:, None, None, None, : rows.stop]
        counted = weights * (vision | elite)[:, None, None, None, : rows.stop]
        counted = counted / counted.sum(-1, keepdim=True).clamp(min=torch.finfo(counted.dtype).tiny)
        weights = torch.where(at_vision, counted, weights) * elite[:, None, None, rows, None]
        sums[..., : rows.stop] += weights.sum(3).mean(2)
    return sums / elite.sum(1)[:, None, None]


def text_first(scores: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Scores (batch, kv_heads, keys), none negative, changed so that every vision token ranks below all text; each
    kind keeps its own order, which adding a constant would round away. Unchanged where nothing is known of vision."""
    if view.vision is None:
        return scores
    below = -1 / scores.clamp(min=torch.finfo(scores.dtype).tiny)
    return torch.where(view.vision_by_head, below, scores)
