"""The places of a video's frames in the prompt, for token methods.

`generate` may encode videos before it calls the model, so the recorder runs from the start of a session.
"""

import inspect
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from ..errors import KVCompressError
from ..scoring.vision import grid_sizes, pooled_frame, video_token_mask, vision_token_mask, writes_lines
from .replacement import Replacement, wrapped

# Models that write the frames of a video with image tokens.
FRAMES_AS_IMAGES = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "molmo2")


class FrameRecorder:
    """Records how many frames and tokens each video has whenever the model encodes videos.

    InternVL takes a video's frames as images and does not say which images are frames; those of a row with as many
    tokens as its first image count as frames.

    Attributes:
        videos: (frames, tokens per frame, tokens after the last frame) of each encoded video.
        grids: their `video_grid_thw` (videos, 3), for a model that takes one.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.videos, self.grids = model.base_model, [], None
        encode = getattr(self.model, "get_video_features", None)
        self.frames_are_images = encode is None and model.config.model_type == "internvl"
        self.has_grid = encode is not None and "video_grid_thw" in inspect.signature(encode).parameters
        self.is_pooled = model.config.model_type == "llava_onevision"

    def attach(self) -> list[Replacement]:
        """Start recording; return the handles that end it."""
        if not (self.has_grid or self.is_pooled):
            return []
        return [wrapped(self.model, "get_video_features", self._encoding)]

    def grid(self, input_ids: torch.Tensor | None) -> torch.Tensor | None:
        """Return the `video_grid_thw` of a prompt (batch, columns), or None if it is unknown.

        `generate` does not pass it to the model if it encoded the videos before."""
        if self.grids is None or input_ids is None:
            return None
        rows = self._by_row(video_token_mask(self.model.config, input_ids))
        return None if rows is None else self.grids[[video for row in rows for video in row]]

    def take(self, input_ids: torch.Tensor) -> dict[str, list[list[torch.Tensor]]]:
        """Return the `frames` of `Tokens` for a prompt (batch, columns). Raises KVCompressError if they are unknown."""
        config = self.model.config
        if self.frames_are_images:
            return {"frames": [_equal_spans(row) for row in vision_token_mask(config, input_ids)]}
        is_known = self.has_grid or self.is_pooled
        if writes_lines(config) or config.model_type in FRAMES_AS_IMAGES or not is_known:
            raise KVCompressError(
                f"the frames of a video are unknown in a {config.model_type} model: it has none, does not tell them "
                "from images or lines of images, or lays them out in a way of its own"
            )
        is_video = video_token_mask(config, input_ids)
        rows = self._by_row(is_video)
        if rows is None:
            raise KVCompressError(
                f"it is unknown how this {config.model_type} model laid out the prompt's "
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

    def _by_row(self, is_video: torch.Tensor) -> list[list[int]] | None:
        """Return the encoded videos of each row of a prompt (batch, columns); None if they are not the prompt's.

        Beam search repeats each row."""
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
        if self.has_grid:
            self.grids = given["video_grid_thw"]
            self.videos = [(frames, size, 0) for frames, size in grid_sizes(self.model.config, self.grids)]
        else:  # videos of equal length, a newline at the end of each
            videos, frames = next(iter(given.values())).shape[:2]  # of the pixels, an argument that was renamed
            self.videos = [(frames, pooled_frame(self.model.config), 1)] * videos
        return encode(*args, **kwargs)


def _equal_spans(vision: torch.Tensor) -> list[torch.Tensor]:
    """Return the spans of vision tokens (columns,) that are as long as the first, as one tensor (spans, length)."""
    columns = vision.nonzero()[:, 0]
    if not len(columns):
        return []
    ends = (columns.diff() > 1).nonzero()[:, 0] + 1
    spans = columns.tensor_split(ends.cpu())
    return [torch.stack([span for span in spans if len(span) == len(spans[0])])]
