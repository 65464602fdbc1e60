"""Convert lmms-eval's chat messages to what a transformers processor takes: conversations, images, videos.

lmms-eval passes a document as `[{"role", "content": [{"type": "image" | "video" | "text", "url" | "text"}]}]`
(`lmms_eval.protocol.ChatMessages`). transformers' chat templates take the same list without the media, and its
processors take the media separately. Videos are decoded with PyAV. lmms-eval's own reader is not used: on a decoding
error it returns every frame of the file, and it does not sample .webm and .mkv at all.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
from lmms_eval.protocol import ChatMessages
from PIL import Image
from transformers.video_utils import VideoMetadata

from kvcompress import KVCompressError


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


def read_image(source: Any) -> Image.Image:
    """Return an image or image file as RGB."""
    if isinstance(source, (str, Path)):
        with Image.open(source) as image:
            return image.convert("RGB")
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    raise KVCompressError(f"an image must be a PIL image or a file name, got {type(source).__name__}")
