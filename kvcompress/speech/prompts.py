"""The prompts: bundled ones, or a file of prompts with pictures and sounds."""

import os
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import ProcessorMixin

from ..errors import KVCompressError, shown
from ..files import parse_json
from ..pictures import read_image
from . import answering
from .kinds import PARTS

# The model needs this system prompt to speak (model card).
SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)


@dataclass(frozen=True)
class SpeechPrompt:
    """A prompt; `image` is RGB, `audio` float32 (samples,) at the processor's rate."""

    text: str
    image: Image.Image | None = None
    audio: np.ndarray | None = None

    def in_words(self, rate: int) -> dict[str, Any]:
        """Describe the prompt for JSON; `rate` is samples per second."""
        seconds = None if self.audio is None else len(self.audio) / rate
        return {"text": self.text, "image": self.image is not None, "audio_s": seconds}


def bundled_prompts(rate: int, without: list[str]) -> list[SpeechPrompt]:
    """Return prompts with text only, with a picture, with sound, and with both, as far as the parts are loaded.

    Picture and sound are synthetic: a model's time depends on how much it sees, not on what.
    """
    picture = Image.new("RGB", (560, 420), "lightblue")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 280, 560, 420), fill="green")
    draw.ellipse((220, 60, 340, 180), fill="yellow")
    seconds = np.arange(3 * rate, dtype=np.float32) / rate
    melody = (0.3 * np.sin(2 * np.pi * np.choose(seconds.astype(int), [440, 554, 659]) * seconds)).astype(np.float32)
    prompts = [
        SpeechPrompt("Please tell me in two sentences why the sky is blue."),
        SpeechPrompt("What is in this picture? Answer in two sentences.", image=picture),
        SpeechPrompt("What do you hear? Answer in two sentences.", audio=melody),
        SpeechPrompt("Does the sound go with the picture? Answer in two sentences.", image=picture, audio=melody),
    ]
    return [prompt for prompt in prompts if not missing_part(prompt, without)]


def read_prompts(file: Path, rate: int, without: list[str]) -> list[SpeechPrompt]:
    """Read the prompts of a JSONL file. Raises KVCompressError, which names the line."""
    prompts = []
    for where, given in read_lines(file):
        image = read_picture(given["image"]) if "image" in given else None
        sound = read_wav(given["audio"], rate) if "audio" in given else None
        prompt = SpeechPrompt(given["text"], image, sound)
        if part := missing_part(prompt, without):
            raise KVCompressError(f"{where} needs {PARTS[part]}, which --without {part} leaves out")
        prompts.append(prompt)
    return prompts


def read_lines(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return (file and line number, text and paths) for each line; image and sound paths are relative to the file.

    Raises KVCompressError, which names the line, also for a missing file.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # a text may hold other line separators
    except OSError as error:
        raise KVCompressError(f"--prompts {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KVCompressError(f"--prompts {file} is not UTF-8 text") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            given = parse_json(line)
        except ValueError as error:
            raise KVCompressError(f"{where} is not JSON: {error}") from None
        if not isinstance(given, dict) or set(given) - {"text", "image", "audio"} or "text" not in given:
            raise KVCompressError(f"{where} needs text, and may have image and audio: {line.strip()[:80]}")
        given = {key: value for key, value in given.items() if key == "text" or value}
        if wrong := [key for key, value in given.items() if not isinstance(value, str)]:
            raise KVCompressError(f"{where}: {wrong[0]} is {shown(given[wrong[0]])}, and should be text")
        media = {key: file.parent / given[key] for key in ("image", "audio") if key in given}
        for path in media.values():
            if not os.path.isfile(path):
                raise KVCompressError(f"{where}: there is no file {path}")
        found.append((where, {**given, **media}))
    if not found:
        raise KVCompressError(f"{file} has no prompts")
    return found


def read_picture(file: Path) -> Image.Image:
    try:
        return read_image(file)
    except KVCompressError:  # says more
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise KVCompressError(f"{file} is not a picture") from None


def read_wav(file: Path, rate: int) -> np.ndarray:
    """Read 16-bit PCM as float32 (samples,), averaging channels. Raises KVCompressError for other formats or rates."""
    try:
        with wave.open(str(file)) as sound:
            found, width, channels = sound.getframerate(), sound.getsampwidth(), sound.getnchannels()
            frames = sound.readframes(sound.getnframes())
        if not frames or len(frames) % (width * channels):
            raise EOFError("it is truncated")
    except (wave.Error, EOFError, OSError) as error:
        raise KVCompressError(f"{file} is not a WAV file: {error}") from None
    if (found, width) != (rate, 2):
        raise KVCompressError(
            f"{file} has {found} Hz and {8 * width} bits; {rate} Hz and 16 bits are needed "
            f"(ffmpeg -i {file.name} -ar {rate} -c:a pcm_s16le OUT.wav)"
        )
    return np.frombuffer(frames, "<i2").reshape(-1, channels).mean(1).astype(np.float32) / 32768


def missing_part(prompt: SpeechPrompt, without: list[str]) -> str | None:
    """Return a part that the prompt needs but that is left out, if any."""
    needed = {"vision": prompt.image is not None, "audio": prompt.audio is not None}
    return next((part for part in without if needed.get(part)), None)


def model_inputs(processor: ProcessorMixin, prompt: SpeechPrompt, device: torch.device) -> dict[str, torch.Tensor]:
    media = [{"type": kind} for kind in ("image", "audio") if getattr(prompt, kind) is not None]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
        {"role": "user", "content": [*media, {"type": "text", "text": prompt.text}]},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    given = {
        "images": None if prompt.image is None else [prompt.image],
        "audio": None if prompt.audio is None else [prompt.audio],
    }
    made = processor(text=[text], return_tensors="pt", **{name: media for name, media in given.items() if media})
    return dict(made.to(device))


@contextmanager
def growing_wav(file: Path) -> Iterator[Callable[[torch.Tensor], None]]:
    """Write float32 blocks (samples,) to a WAV file that is complete after each block."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as raw, wave.open(raw, "wb") as sound:
        sound.setparams((1, 2, answering.SAMPLING_RATE, 0, "NONE", ""))

        def write(block: torch.Tensor) -> None:
            sound.writeframes((block.clamp(-1, 1) * 32767).to(torch.int16).numpy().tobytes())
            raw.flush()

        yield write
