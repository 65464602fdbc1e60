"""Carry out the input methods on a prompt: leave out its images and videos, or shrink them."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from kvcompress import KVCompressError
from kvcompress.scoring.vision import vision_token_mask

from .input_methods import Blind, Compression
from .prompts import ChatProcessor, ChatPrompt, shapes_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class TokensOf:
    """The tokens of a prompt, and how many of them are vision tokens."""

    all: int
    vision: int


class Reducer:
    """Reduces prompts for one model. Sizes that were found are remembered: they depend on the pictures' sizes only."""

    def __init__(self, chat: ChatProcessor, config: "PreTrainedConfig"):
        self._chat, self._config = chat, config
        self._shares: dict[tuple[object, ...], float] = {}

    def reduced(
        self, prompts: list[ChatPrompt], compression: Compression
    ) -> tuple[list[ChatPrompt], list[TokensOf | None]]:
        """Return the prompts that the model is shown, and the tokens of those given; None where nothing is done.

        Raises KVCompressError if the processor makes more tokens than asked for, however small the pictures are.
        """
        both = [self._reduced(prompt, compression) for prompt in prompts]
        return [prompt for prompt, _ in both], [whole for _, whole in both]

    def _reduced(self, prompt: ChatPrompt, compression: Compression) -> tuple[ChatPrompt, TokensOf | None]:
        if compression.inputs is None or not (prompt.images or prompt.videos):
            return prompt, None
        whole = self._tokens(prompt)
        if isinstance(compression.inputs, Blind):
            return without_media(prompt), whole
        key = (shapes_of(prompt), compression.identity)
        if key not in self._shares:
            self._shares[key] = self._share(prompt, compression, whole.vision)
        return shrunk(prompt, self._shares[key], compression.inputs.fewer_frames), whole

    def _tokens(self, prompt: ChatPrompt) -> TokensOf:
        ids = self._chat.inputs([prompt])["input_ids"]
        return TokensOf(ids.shape[1], int(vision_token_mask(self._config, ids).sum()))

    def _share(self, prompt: ChatPrompt, compression: Compression, whole: int) -> float:
        """Search by bisection for the share of the sides, or of the frames, that makes the most vision tokens within
        the limit; `whole`: those at full size."""
        limit, fewer_frames = compression.vision_tokens(whole), compression.inputs.fewer_frames
        if limit >= whole:
            return 1.0
        steps = _steps(prompt, fewer_frames)
        low, high, best, made = 0, steps, (0, 0), {whole}
        while high - low > 1:
            middle = (low + high) // 2
            try:
                tokens = self._tokens(shrunk(prompt, middle / steps, fewer_frames)).vision
            except KVCompressError:  # some processors refuse very small pictures
                low = middle
                continue
            made.add(tokens)
            if tokens <= limit:
                low, best = middle, max(best, (tokens, middle))
            else:
                high = middle
        if not best[0]:
            pictures = f"pictures of {' and '.join('x'.join(map(str, shape)) for shape in shapes_of(prompt))}"
            never_fewer = "whatever their size" if len(made) == 1 else f"and never fewer than {min(made)}"
            raise KVCompressError(
                f"downsample: {limit} vision tokens are asked for, but the processor of {self._chat.args.pretrained} "
                f"makes {whole} of {pictures}, {never_fewer}"
            )
        return best[1] / steps


def without_media(prompt: ChatPrompt) -> ChatPrompt:
    """Return the prompt without images and videos, and without their places in the conversation."""
    texts = [
        {**message, "content": [part for part in message["content"] if part["type"] == "text"]}
        for message in prompt.conversation
    ]
    return ChatPrompt(conversation=texts)


def shrunk(prompt: ChatPrompt, share: float, fewer_frames: bool = False) -> ChatPrompt:
    """Return the prompt with the sides of its images and video frames multiplied by `share`, in (0, 1]; with
    `fewer_frames`, videos keep that share of their frames instead, evenly spread."""
    if share == 1:
        return prompt
    images = [image.resize(_scaled(image.size, share), Image.Resampling.BICUBIC) for image in prompt.images]
    if not fewer_frames:
        return replace(prompt, images=images, videos=[_smaller(video, share) for video in prompt.videos])
    videos, metadata = [], []
    for video, of_video in zip(prompt.videos, prompt.video_metadata, strict=True):
        kept = np.linspace(0, len(video) - 1, max(1, round(share * len(video))), dtype=int)
        videos.append(video[kept])
        metadata.append(replace(of_video, frames_indices=[of_video.frames_indices[place] for place in kept]))
    return replace(prompt, images=images, videos=videos, video_metadata=metadata)


def _smaller(video: np.ndarray, share: float) -> np.ndarray:
    """`video`: uint8 (frames, height, width, 3)."""
    height, width = video.shape[1:3]
    size = _scaled((width, height), share)
    return np.stack([Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC) for frame in video])


def _scaled(size: tuple[int, int], share: float) -> tuple[int, int]:
    width, height = size
    return max(1, round(share * width)), max(1, round(share * height))


def _steps(prompt: ChatPrompt, fewer_frames: bool) -> int:
    """Return how many shares can be told apart: the longest side, or the most frames."""
    sides = [side for image in prompt.images for side in image.size]
    return max(
        sides
        + [length for video in prompt.videos for length in (video.shape[:1] if fewer_frames else video.shape[1:3])]
    )
