"""Finding a prompt's image and video tokens, and scoring by the attention of the question after them."""

from typing import TYPE_CHECKING

import torch

from ..device import on_device
from .layer_view import LayerView

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RECENT_QUERIES = 32  # observing queries if no image marks where the question begins
VIDEO_ID_NAMES = ("video_token_id", "video_token_index")
DECODED_QUERIES = 16  # observing queries while decoding


def vision_token_ids(config: "PreTrainedConfig") -> list[int]:
    """Return the placeholder ids of image and video tokens in `input_ids`; empty for a text-only model."""
    names = ("image_token_id", "image_token_index", *VIDEO_ID_NAMES)
    return sorted({value for name in names if (value := getattr(config, name, None)) is not None})


def vision_token_mask(config: "PreTrainedConfig", input_ids: torch.Tensor) -> torch.Tensor:
    """Return bool (batch, columns), True at image and video tokens. There may be several spans or none."""
    return torch.isin(input_ids, on_device(vision_token_ids(config), input_ids.device, input_ids.dtype))


def video_token_mask(config: "PreTrainedConfig", input_ids: torch.Tensor) -> torch.Tensor:
    """Return bool (batch, columns), True at the tokens of videos that are not written as images."""
    ids = [value for name in VIDEO_ID_NAMES if (value := getattr(config, name, None)) is not None]
    return torch.isin(input_ids, on_device(ids, input_ids.device, input_ids.dtype))


def frame_tokens(
    config: "PreTrainedConfig", input_ids: torch.Tensor, video_grid_thw: torch.Tensor | None
) -> tuple[int, ...]:
    """Return the number of vision tokens per frame, for each row of `input_ids` (on the host); 0 if unknown.

    The number is known for videos of the Qwen-VL family, from the processor's `video_grid_thw` (videos, 3); for videos
    of LLaVA-OneVision and LLaVA-NeXT-Video, from the config; for Gemma 4, from the spans; and for rows with several
    spans of vision tokens of equal length, each of which is a frame (InternVL, GLM-4.1V; also several images of one
    size). It is unknown if a row's frames differ in size, if a row has images besides its video, and in models that
    write an image as several spans (Pixtral, Mistral 3, Molmo 2).
    """
    vision = vision_token_mask(config, input_ids)
    videos = [] if video_grid_thw is None else grid_sizes(config, video_grid_thw)
    result = []
    for row, of_video in zip(vision, video_token_mask(config, input_ids).sum(1).tolist(), strict=True):
        kinds, lengths = row.unique_consecutive(return_counts=True)
        spans, sizes, left = lengths[kinds].tolist(), set(), of_video
        while left > 0 and videos:
            frames, size = videos.pop(0)
            sizes.add(size)
            left -= frames * size
        if of_video != sum(spans):  # images, with or without a video
            sizes = set(spans) if not of_video and len(spans) > 1 and not writes_lines(config) else set()
        elif config.model_type == "gemma4":
            sizes = set(spans)
        elif config.model_type in ("llava_onevision", "llava_next_video") and len(spans) == 1:
            if config.model_type == "llava_onevision":
                sizes = {pooled_frame(config)}
            else:
                side = config.vision_config.image_size // config.vision_config.patch_size
                sizes = {(side // config.spatial_pool_stride) ** 2}
        result.append(sizes.pop() if len(sizes) == 1 else 0)
    return tuple(result)


def writes_lines(config: "PreTrainedConfig") -> bool:
    """Return whether each line of an image's patches is a separate span of vision tokens (Pixtral, Mistral 3)."""
    return getattr(getattr(config, "vision_config", None), "model_type", None) == "pixtral"


def grid_sizes(config: "PreTrainedConfig", video_grid_thw: torch.Tensor) -> list[tuple[int, int]]:
    """Return the number of frames and the tokens per frame of each video; empty if the config does not say how many
    patches become one token (VideoLLaMA 3)."""
    merged = getattr(config.vision_config, "spatial_merge_size", None)
    if merged is None:
        return []
    return [(frames, height * width // merged**2) for frames, height, width in video_grid_thw.tolist()]


def pooled_frame(config: "PreTrainedConfig") -> int:
    """Return the tokens of a video's frame in LLaVA-OneVision, which pools patches 2 x 2, the last row and column
    too."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    return ((side + 1) // 2) ** 2


def observer_queries(view: LayerView, keys: torch.Tensor) -> torch.Tensor:
    """Return the queries that ask about the images, those after each row's last vision token: bool (batch, columns).

    In a row without vision tokens, or without tokens after the last one, the last `RECENT_QUERIES` real tokens observe;
    likewise in every row if vision tokens are unknown. `keys` is (batch, kv_heads, columns, head_dim).
    """
    columns = keys.shape[2]
    first = columns - on_device(observer_counts(view), keys.device)
    return torch.arange(columns, device=keys.device) >= first[:, None]


def observer_counts(view: LayerView) -> list[int]:
    """Return how many of each row's last tokens are `observer_queries`."""
    behind = view.question_lengths
    if not behind:
        behind = view.lengths if view.vision is None else question_lengths_of(view.vision, view.lengths)
    return [
        asking if 0 < asking < length else min(length, RECENT_QUERIES)
        for asking, length in zip(behind, view.lengths, strict=True)
    ]


def question_lengths_of(vision: torch.Tensor, lengths: list[int]) -> tuple[int, ...]:
    """Return `LayerView.question_lengths`, given `LayerView.vision` and `lengths`. Waits for a device."""
    behind = torch.where(vision.any(1), vision.flip(1).int().argmax(1), vision.shape[1]).tolist()
    return tuple(map(min, behind, lengths))


def question_attention(queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Return the attention that each key receives from `observer_queries`: (batch, kv_heads, keys).

    While decoding, the recent queries observe. Attention is summed over the queries and averaged over the query heads
    of a KV head. Arguments are as in `KVCluster.score`."""
    asking = None if view.is_decoding else observer_queries(view, keys)
    return view.column_sums(queries, keys, asking)


def elite_attention(queries: torch.Tensor, keys: torch.Tensor, view: LayerView, alpha: float) -> torch.Tensor:
    """Return the attention that each key of a prompt receives from the elite queries on average (AirCache).

    Elite are the observers to which the last query gives at least `alpha` of its largest weight, averaged over the
    heads, when it attends only to observers (equation 4). A vision token gets a share of the attention to vision tokens
    and elite queries only, a text token a share of all attention. The result is (batch, kv_heads, keys), averaged over
    the query heads of a KV head.
    """
    asking = observer_queries(view, keys)
    last = view.window_logits(queries, keys, 1)[..., 0, :].masked_fill(~asking[:, None, None], float("-inf"))
    last = last.softmax(-1).mean((1, 2))
    elite = asking & (last >= alpha * last.amax(1, keepdim=True))
    vision = torch.zeros_like(elite) if view.vision is None else view.vision
    first = keys.shape[2] - max(observer_counts(view))
    sums = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    for rows, weights in view.attention_blocks(queries, keys, first):
        at_vision = vision[:, None, None, None, : rows.stop]
        counted = weights * (vision | elite)[:, None, None, None, : rows.stop]
        counted = counted / counted.sum(-1, keepdim=True).clamp(min=torch.finfo(counted.dtype).tiny)
        weights = torch.where(at_vision, counted, weights) * elite[:, None, None, rows, None]
        sums[..., : rows.stop] += weights.sum(3).mean(2)
    return sums / elite.sum(1)[:, None, None]


def text_first(scores: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Change scores (batch, kv_heads, keys), none negative, so that every vision token ranks below all text.

    Each kind keeps its own order, which rounding would destroy if a constant were added. Scores are unchanged if vision
    tokens are unknown."""
    if view.vision is None:
        return scores
    if view.settings.head_budget == "shared":  # heads are averaged before vision tokens are ranked below text
        scores = scores.mean(1, keepdim=True).expand_as(scores)
    below = -1 / scores.clamp(min=torch.finfo(scores.dtype).tiny)
    return torch.where(view.vision_by_head, below, scores)
