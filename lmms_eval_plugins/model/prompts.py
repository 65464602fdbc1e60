"""Convert lmms-eval's chat messages to model inputs, with the checkpoint's own processor and chat template.

lmms-eval passes a document as `[{"role", "content": [{"type": "image" | "video" | "text", "url" | "text"}]}]`
(`lmms_eval.protocol.ChatMessages`). transformers' chat templates take the same list without the media, and its
processors take the media separately. Videos are decoded with PyAV. lmms-eval's own reader is not used: on a decoding
error it returns every frame of the file, and it does not sample .webm and .mkv at all.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np
import torch
from lmms_eval.api.instance import Instance
from lmms_eval.protocol import ChatMessages
from loguru import logger
from PIL import Image
from transformers import BatchFeature
from transformers.video_utils import VideoMetadata

from kvcompress import KVCompressError
from kvcompress.errors import one_line
from kvcompress.pictures import read_image

from .arguments import ModelArguments

Answer, Prepared = TypeVar("Answer"), TypeVar("Prepared")
Shapes = tuple[tuple[int, ...], ...]  # of a prompt's images and clips


@dataclass
class ChatPrompt:
    """One document, ready for a processor.

    Attributes:
        conversation: messages whose content lists hold `{"type": "text", "text": ...}` and bare media placeholders.
        images: RGB images in the order of their placeholders.
        videos: uint8 arrays (frames, height, width, 3), in the order of their placeholders.
        video_metadata: one per video: the frames taken and their rate (Qwen3-VL derives timestamps from it).
        written: the finished prompt, if a harness has written it; no chat template is applied then.
    """

    conversation: list[dict[str, Any]]
    images: list[Image.Image] = field(default_factory=list)
    videos: list[np.ndarray] = field(default_factory=list)
    video_metadata: list[VideoMetadata] = field(default_factory=list)
    written: str | None = None


def read_messages(messages: ChatMessages, max_frames_num: int, video_fps: float | None = None) -> ChatPrompt:
    """Split a document's lmms-eval messages into a conversation and its media.

    Raises KVCompressError for audio, for clips cut out of a video, and for anything that is not an image or a
    video file.
    """
    prompt = ChatPrompt(conversation=[])
    for message in messages.messages:
        content = []
        for part in message.content:
            if part.type == "text":
                content.append({"type": "text", "text": part.text})
                continue
            if part.type == "image":
                prompt.images.append(read_image(part.url))
            elif part.type == "video":
                if part.start_time is not None or part.end_time is not None:
                    raise KVCompressError("clips (start_time, end_time) of a video are not supported, only whole files")
                frames, metadata = read_video(part.url, max_frames_num, video_fps)
                prompt.videos.append(frames)
                prompt.video_metadata.append(metadata)
            else:
                raise KVCompressError(f"content of type {part.type!r} is not supported: text, image, video")
            content.append({"type": part.type})
        prompt.conversation.append({"role": message.role, "content": content})
    return prompt


def digest(messages: ChatMessages | str) -> bytes:
    """Hash everything that `read_messages` reads, so equal digests mean equal prompts; for a finished prompt, its text.
    A video is identified by its file's name, size and date, which needs no decoding."""
    if isinstance(messages, str):
        return hashlib.blake2b(messages.encode(errors="surrogatepass"), digest_size=16, person=b"written").digest()
    found = hashlib.blake2b(digest_size=16)
    for message in messages.messages:
        found.update(repr(message.role).encode())
        for part in message.content:
            found.update(part.type.encode())
            if part.type == "text":
                found.update(repr(part.text).encode())
            elif part.type == "image":
                image = read_image(part.url)
                found.update(repr(image.size).encode())
                found.update(image.tobytes())
            elif part.type == "video" and isinstance(part.url, (str, Path)) and Path(part.url).is_file():
                stat = Path(part.url).stat()
                found.update(repr((str(part.url), stat.st_size, stat.st_mtime_ns)).encode())
    return found.digest()


def read_video(
    path: str | Path, max_frames_num: int, video_fps: float | None = None
) -> tuple[np.ndarray, VideoMetadata]:
    """Read at most `max_frames_num` frames, evenly spread from the first to the last; with `video_fps`, at most that
    many per second, but at least one.

    Returns uint8 frames (frames, height, width, 3) and their metadata. Only these frames are converted and held, so
    memory does not depend on the length of the file.
    """
    if not isinstance(path, (str, Path)):
        raise KVCompressError(f"a video must be a file name, got {type(path).__name__}")
    with av.open(str(path)) as container:
        if not container.streams.video:  # only sound
            raise KVCompressError(f"{path} holds no video frame")
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        # Matroska and WebM do not record their number of frames: count packets, which needs no decoding.
        total = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        fps = float(stream.average_rate) if stream.average_rate else None
    if total == 0:
        raise KVCompressError(f"{path} holds no video frame")
    count = min(total, max_frames_num)
    if video_fps is not None:
        if fps is None:
            raise KVCompressError(f"video_fps={video_fps:g}: {path} does not record its frame rate")
        count = max(1, min(count, round(total / fps * video_fps)))
    wanted = np.linspace(0, total - 1, count, dtype=int)
    with av.open(str(path)) as container:
        container.streams.video[0].thread_type = "AUTO"
        frames, taken = [], []
        for index, frame in enumerate(container.decode(video=0)):
            if index > wanted[-1]:
                break
            if index in wanted:
                frames.append(frame.to_ndarray(format="rgb24"))
                taken.append(index)
    if not frames:
        raise KVCompressError(f"{path} holds no video frame that could be decoded")
    height, width = frames[0].shape[:2]
    metadata = VideoMetadata(
        total_num_frames=total,
        fps=fps,
        width=width,
        height=height,
        duration=total / fps if fps else None,
        video_backend="pyav",
        frames_indices=taken,
    )
    return np.stack(frames), metadata


def resize_with_qwen_vl_utils(image: Image.Image, patch_size: int) -> Image.Image:
    """Resize an image with Pillow to a whole number of tokens (2 x 2 patches) per side, at most 16384 in all.

    Qwen's own scripts and lmms-eval's Qwen wrappers do this before the processor, which may then resize again within
    `min_pixels` and `max_pixels`. The pixels, and for small images the sides, differ from the processor's own resizing.
    """
    from qwen_vl_utils import fetch_image

    return fetch_image({"image": image}, image_patch_size=patch_size)


class DoNotBatch(KVCompressError):
    """Raised if a processor cannot batch images or clips of different shapes.

    Attributes:
        shapes: the shapes in each prompt.
    """

    def __init__(self, shapes: list[Shapes]):
        self.shapes = shapes
        clips = sorted({shape[0] for of_prompt in shapes for shape in of_prompt if len(shape) == 4})
        what = f"clips of {' and '.join(map(str, clips))} frames" if len(clips) > 1 else "images of different shapes"
        super().__init__(f"the processor cannot batch {what}")


def shapes_of(prompt: ChatPrompt) -> Shapes:
    """Return the shapes of a prompt's videos, (frames, height, width, 3), and images, (width, height)."""
    return tuple(video.shape for video in prompt.videos) + tuple(image.size for image in prompt.images)


class ChatProcessor:
    """Makes the prompts of a batch; touches neither the model nor the device.

    Attributes:
        processor: transformers' own; for a text-only model it is the tokenizer.
        dtype: the model's precision, to which pixels are converted.
    """

    def __init__(self, args: ModelArguments, processor: Any, dtype: torch.dtype = torch.float32):
        self.args, self.processor, self.dtype = args, processor, dtype
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.has_vision = self.tokenizer is not processor
        # Placeholders of media in a prompt, such as `<image>`; the same text in a task must not be taken for one.
        names = [name for name in vars(processor) if name.endswith("_token")] if self.has_vision else []
        self._placeholders = sorted({str(getattr(processor, name)) for name in names} - {"", "None"})

    def read(self, messages: ChatMessages | str, task: str) -> ChatPrompt:
        """Read a question's messages with their images and videos, or wrap a finished prompt. Raises KVCompressError,
        naming `task`, if a text-only model is shown media."""
        if isinstance(messages, str):
            return ChatPrompt(conversation=[], written=self._escaped(messages))
        prompt = read_messages(messages, self.args.max_frames_num, self.args.video_fps)
        if not self.has_vision and (prompt.images or prompt.videos):
            raise KVCompressError(
                f"task {task!r} shows images or videos, but {self.args.pretrained} is a text-only model"
            )
        if self.args.image_resize is not None:
            patch_size = self.processor.image_processor.patch_size
            prompt.images = [resize_with_qwen_vl_utils(image, patch_size) for image in prompt.images]
        if system := text_of(self.args.system_prompt or ""):
            others = prompt.conversation
            if others and others[0]["role"] == "system":
                others = others[1:]
            prompt.conversation = [{"role": "system", "content": [{"type": "text", "text": system}]}, *others]
        for part in chain.from_iterable(message["content"] for message in prompt.conversation):
            if part["type"] == "text":
                part["text"] = self._escaped(part["text"])
        return prompt

    def _escaped(self, text: str) -> str:
        """Escape placeholders in a task's own text: `<image>` becomes `< image>`."""
        for placeholder in self._placeholders:
            text = text.replace(placeholder, f"{placeholder[0]} {placeholder[1:]}")
        return text

    def text(self, prompt: ChatPrompt) -> str:
        """Render the prompt with the chat template, with a placeholder for each image or video.

        Raises KVCompressError if the template is wrong or refuses the conversation.
        """
        return self.templated(prompt.conversation) if prompt.written is None else prompt.written

    def templated(self, conversation: list[dict[str, Any]], starts_answer: bool = False) -> str:
        """Render a conversation, as in `ChatPrompt`, with the chat template. `starts_answer`: its last message is the
        beginning of the answer."""
        try:
            return self.processor.apply_chat_template(
                conversation if self.has_vision else _as_strings(conversation),
                tokenize=False,
                **({"continue_final_message": True} if starts_answer else {"add_generation_prompt": True}),
            )
        except Exception as error:  # a template's expressions may raise anything
            raise self._wrong_template(f"{type(error).__name__}: {error}") from error

    def _wrong_template(self, reason: str) -> KVCompressError:
        return KVCompressError(f"{self._template}: {one_line(reason)}")

    @property
    def _template(self) -> str:
        return f"chat template {self.args.chat_template or f'of {self.args.pretrained}'}"

    def inputs(self, prompts: list[ChatPrompt]) -> BatchFeature:
        """Return the model inputs of a batch, left-padded, on the CPU. Raises DoNotBatch for images or clips that the
        processor cannot batch, and KVCompressError if the chat template does not show each image exactly once."""
        texts = [self.text(prompt) for prompt in prompts]
        arguments: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
        # A chat template writes the begin-of-sequence token itself if the model needs one.
        bos = self.tokenizer.bos_token
        is_plain = self.args.chat_template == "plain"
        if prompts[0].written is not None:  # plain text, unless a template wrote it
            is_plain = not (bos and texts[0].startswith(bos))
        if not is_plain and (not self.has_vision or (bos and texts[0].startswith(bos))):
            arguments["add_special_tokens"] = False
        if any(prompt.images for prompt in prompts):
            images = [prompt.images for prompt in prompts]
            # LLaVA-OneVision's processor treats each image of a flat list as the only one of its question.
            arguments["images"] = list(chain.from_iterable(images)) if self.args.tile_every_image else images
        if any(prompt.videos for prompt in prompts):
            arguments["videos"] = [video for prompt in prompts for video in prompt.videos]
            arguments["video_metadata"] = [metadata for prompt in prompts for metadata in prompt.video_metadata]
            arguments["do_sample_frames"] = False
        try:
            inputs = dict(self.processor(text=texts, **arguments))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            shapes = [shapes_of(prompt) for prompt in prompts]
            if len(set(shapes)) > 1 and "pixel_values" in str(error):
                raise DoNotBatch(shapes) from error
            shown = "a question's images or videos, or " if {"images", "videos"} & arguments.keys() else ""
            raise KVCompressError(
                f"the processor refuses {shown}the prompt that {self._template} wrote: {type(error).__name__}: "
                f"{one_line(error)}"
            ) from error
        self._check_shown(prompts, inputs["input_ids"])
        # Frame positions are multiples of this value, so it must not be rounded to the model's precision.
        exact = {name: value for name, value in inputs.items() if name == "second_per_grid_ts"}
        return BatchFeature({**BatchFeature(inputs).to(self.dtype), **exact})

    def _check_shown(self, prompts: list[ChatPrompt], input_ids: torch.Tensor) -> None:
        """Raise KVCompressError if the template left out a prompt's images: the model would not see them."""
        names = ("image_token_id", "video_token_id")
        ids = [value for name in names if isinstance(value := getattr(self.processor, name, None), int)]
        sees = torch.isin(input_ids, torch.tensor(ids, dtype=input_ids.dtype)).any(1).tolist()
        for prompt, is_shown in zip(prompts, sees, strict=True):
            if ids and (prompt.images or prompt.videos) and prompt.written is None and not is_shown:
                raise self._wrong_template(
                    f"it leaves out the question's images: its prompt has no {' or '.join(self._placeholders)}"
                )


def on_device(inputs: BatchFeature, device: torch.device) -> BatchFeature:
    """Return a copy of the inputs on a device."""
    return BatchFeature(dict(inputs)).to(device)


def text_of(text_or_file: str) -> str:
    """Return the text of an argument that is either the text itself or a file with it."""
    return Path(text_or_file).read_text(encoding="utf-8").strip() if os.path.isfile(text_or_file) else text_or_file


def _as_strings(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join content parts into strings, which many templates of text-only models expect."""
    return [{**message, "content": "".join(part["text"] for part in message["content"])} for message in conversation]


@cache
def say_in_parts(task: str) -> None:
    """Warn once per task that its questions cannot share a batch."""
    logger.warning(f"{task}: the processor cannot batch images or clips of different shapes; using smaller batches")


def parts_of(
    requests: list[Instance], prepare: Callable[[list[Instance]], Prepared]
) -> list[tuple[list[int], Prepared]]:
    """Prepare the requests as one batch, or as one batch per shape if the processor cannot mix shapes. Each comes with
    the indices of its requests."""
    places = list(range(len(requests)))
    try:
        return [(places, prepare(requests))]
    except DoNotBatch as error:
        say_in_parts(requests[0].args[4])
        alike: dict[Shapes, list[int]] = {}
        for place, shapes in zip(places, error.shapes, strict=True):
            alike.setdefault(shapes, []).append(place)
        return [(part, prepare([requests[place] for place in part])) for part in alike.values()]


def in_order(places: list[list[int]], answers: list[list[Answer]]) -> list[Answer]:
    """Merge the answers to a batch's parts in the order of its requests; `places` holds each part's indices."""
    by_place = dict(zip(chain.from_iterable(places), chain.from_iterable(answers), strict=True))
    return [by_place[place] for place in range(len(by_place))]
