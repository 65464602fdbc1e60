"""Streaming speech: codec tokens of a Qwen2.5-Omni become sound while the talker still writes.

token2wav has two halves. A diffusion transformer (DiT) makes the spectrogram in blocks; in each evaluation a block sees
a few blocks before and after it. A convolutional vocoder makes the samples. Both run on windows that slide along the
codec tokens; see `Window` for what that leaves out.
"""

import contextvars
import math
import queue
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, Qwen2_5OmniForConditionalGeneration, StoppingCriteriaList

from ..errors import KVCompressError, unknown_name
from ..hooks.replacement import Replacement
from .overlapped import EachToken, generate_overlapped

STEPS = 10  # token2wav's default time points from noise to spectrogram; between two of them, four evaluations
EVALUATIONS = 4
ACTIVATION_REACH = 7  # samples on each side: two filters with 12 taps, at twice the rate


@dataclass(frozen=True)
class Window:
    """The blocks that token2wav sees at a time; a block of its DiT is 24 frames, 0.24 s, in the published checkpoints.

    In one evaluation a block sees few others (published: two before, one after), but each evaluation starts from the
    previous one's result. The whole waveform's first sample therefore depends, with decreasing weight, on codec tokens
    36 such steps away: 8.6 s. `exact` covers all of that. A smaller window starts sooner and leaves out the distant
    part.

    Attributes:
        chunk: blocks that become sound at once.
        behind, ahead: blocks before and after them that are also computed, and discarded.
    """

    chunk: int = 4
    behind: int = 4
    ahead: int = 2

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.behind < 0 or self.ahead < 0:
            raise KVCompressError(f"{self}: chunk must be at least 1, behind and ahead at least 0")

    @classmethod
    def exact(cls, token2wav: PreTrainedModel, chunk: int = 4) -> "Window":
        """Return the smallest window that leaves out nothing: it gives the whole waveform's samples, up to rounding."""
        config = token2wav.config.dit_config
        depth = EVALUATIONS * (STEPS - 1)
        layers = range(config.num_hidden_layers)
        behind, ahead = (
            depth * sum(layer in looking for layer in layers)
            for looking in (config.look_backward_layers, config.look_ahead_layers)
        )
        return cls(chunk, behind, ahead)


def vocoder_reach(config: Any) -> int:
    """Return the most frames on each side that a frame's samples depend on. `config` is a BigVGAN's."""
    reach, rate = 3.0, 1  # its first convolution has 7 taps
    taps = max(
        sum((kernel - 1) // 2 * (dilation + 1) + 2 * ACTIVATION_REACH for dilation in dilations)
        for kernel, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
    )
    for stride, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
        reach += (kernel / (2 * stride) + 1) / rate
        rate *= stride
        reach += taps / rate
    return math.ceil(reach + (ACTIVATION_REACH + 3) / rate)


class BlockNoise:
    """The noise that sound starts from, drawn block by block, so that it is the same for windows of every size."""

    def __init__(self, token2wav: PreTrainedModel, seed: int):
        config = token2wav.config.dit_config
        self._shape = (1, config.block_size, config.mel_dim)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, blocks: int) -> torch.Tensor:
        """Draw the next blocks, float32 (1, frames, mel)."""
        drawn = [torch.randn(self._shape, generator=self._generator) for _ in range(blocks)]
        return torch.cat(drawn, 1) if drawn else torch.empty(1, 0, self._shape[-1])


class GivenNoise(TorchFunctionMode):
    """Context manager in which `torch.randn` returns `noise`, as transformers' sampler has no argument for it."""

    def __init__(self, noise: torch.Tensor):
        super().__init__()
        self.noise = noise

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.noise if func is torch.randn else func(*args, **(kwargs or {}))


class SoundStream:
    """token2wav on a sliding window. Its memory does not grow with the length of the speech.

    Args:
        token2wav: a Qwen2.5-Omni's.
        conditioning, reference_mel: the speaker's `cond` (1, dim) and `ref_mel` (1, frames, mel).
        seed: seed of the noise.
    """

    def __init__(
        self,
        token2wav: PreTrainedModel,
        conditioning: torch.Tensor,
        reference_mel: torch.Tensor,
        window: Window | None = None,
        seed: int = 0,
    ):
        dit = token2wav.config.dit_config
        self.window = window or Window()
        self._dit, self._vocoder = token2wav.code2wav_dit_model, token2wav.code2wav_bigvgan_model
        self._device = token2wav.device
        self._conditioning = conditioning.to(self._device).float()
        self._reference_mel = reference_mel.to(self._device).float()
        self._reach = vocoder_reach(token2wav.config.bigvgan_config)
        self._samples = math.prod(token2wav.config.bigvgan_config.upsample_rates)  # per frame
        self._repeats = dit.repeats
        if dit.block_size % dit.repeats:
            raise KVCompressError(f"block_size={dit.block_size} is not a multiple of repeats={dit.repeats}")
        self._block, self._codes_of_block = dit.block_size, dit.block_size // dit.repeats
        self._source = BlockNoise(token2wav, seed)
        self._codes, self._noise = [], self._source.draw(0)  # from block `_first` on
        self._first = self._made = self._drawn = 0  # blocks
        self._mel = torch.empty(1, dit.mel_dim, 0, device=self._device)  # from frame `_mel_first` on
        self._mel_first = self._spoken = 0  # frames

    @property
    def held(self) -> int:
        """The number of buffered values: codec tokens, noise and spectrogram."""
        return len(self._codes) + self._noise.numel() + self._mel.numel()

    def feed(self, codes: list[int], is_end: bool = False) -> Iterator[torch.Tensor]:
        """Take codec tokens and yield the sound that is ready: float32 (samples,) on the CPU, never empty.

        Args:
            is_end: whether these are the last; all remaining sound is then made.
        """
        self._codes += codes
        while True:
            total = self._first * self._codes_of_block + len(self._codes)
            chunk_end, ahead_end = self._made + self.window.chunk, self._made + self.window.chunk + self.window.ahead
            if total < ahead_end * self._codes_of_block:
                if not is_end:
                    return
                chunk_end = min(chunk_end, math.ceil(total / self._codes_of_block))
            if chunk_end > self._made:
                self._make_mel(chunk_end, min(ahead_end * self._codes_of_block, total))
            is_last = is_end and chunk_end * self._codes_of_block >= total
            sound = self._speak(is_last)
            if len(sound):
                yield sound
            if is_last:
                return

    @torch.no_grad()
    def _make_mel(self, chunk_end: int, codes_end: int) -> None:
        """Make the spectrogram of the blocks from `_made` to `chunk_end`, using codec tokens up to `codes_end`."""
        blocks_end = math.ceil(codes_end / self._codes_of_block)
        self._noise = torch.cat([self._noise, self._source.draw(blocks_end - self._drawn)], 1)
        self._drawn = max(self._drawn, blocks_end)
        start = self._first * self._codes_of_block
        codes = torch.tensor([self._codes[: codes_end - start]], device=self._device)
        noise = self._noise[:, : codes.shape[1] * self._repeats].to(self._device)
        with GivenNoise(noise):
            mel = self._dit.sample(self._conditioning, self._reference_mel, codes, num_steps=STEPS)
        since, until = ((block - self._first) * self._block for block in (self._made, chunk_end))
        self._mel = torch.cat([self._mel, mel[..., since:until]], -1)
        self._made = chunk_end
        gone = max(0, chunk_end - self.window.behind - self._first)
        self._codes, self._noise = self._codes[gone * self._codes_of_block :], self._noise[:, gone * self._block :]
        self._first += gone

    @torch.no_grad()
    def _speak(self, is_last: bool) -> torch.Tensor:
        """Make the samples of frames that are followed by the vocoder's reach, or by the end."""
        until = self._mel_first + self._mel.shape[-1] - (0 if is_last else self._reach)
        if until <= self._spoken:
            return torch.empty(0)
        waveform = self._vocoder(self._mel).reshape(-1).float()
        sound = waveform[(self._spoken - self._mel_first) * self._samples : (until - self._mel_first) * self._samples]
        gone = max(0, until - self._reach - self._mel_first)
        self._mel, self._mel_first, self._spoken = self._mel[..., gone:], self._mel_first + gone, until
        return sound


def known_speaker(model: Qwen2_5OmniForConditionalGeneration, name: str | None) -> str:
    """Return a speaker's name, the first one for None. Raises KVCompressError for a name that the model lacks."""
    if name is None:
        return next(iter(model.speaker_map))
    if name not in model.speaker_map:
        raise unknown_name("there is no speaker", name, model.speaker_map)
    return name


def stream(
    model: Qwen2_5OmniForConditionalGeneration,
    speaker: str,
    window: Window | None = None,
    seed: int = 0,
    overlap: bool = False,
    **generate_kwargs: Any,
) -> Generator[torch.Tensor, None, torch.LongTensor]:
    """Run `model.generate(speaker=speaker, **generate_kwargs)` for one prompt, and yield the sound as it is made.

    `generate` runs in its own thread; this thread turns the available codec tokens into sound. While it makes the first
    sound, thinker and talker wait, so as not to delay it. Closing the generator ends the answer.

    ```python
    for block in stream(model, "Chelsie", **inputs):
        player.write(block.numpy())
    ```

    Args:
        seed: seed of the noise that sound starts from; the talker samples from torch's own generator.
        overlap: whether the talker starts with the first text tokens, see overlapped.py; the answer is the same.

    Yields:
        float32 (samples,) on the CPU at 24 kHz.

    Returns:
        the first result of `generate`: LongTensor (1, tokens), the prompt and the text.
    """
    voice = model.speaker_map[known_speaker(model, speaker)]
    if model.token2wav.dtype != torch.float:
        model.token2wav.float()  # `generate` would do this, but while we read it
    sound = SoundStream(model.token2wav, voice["cond"], voice["ref_mel"], window, seed)
    arriving: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    stopped, may_write, whole = threading.Event(), threading.Event(), []
    may_write.set()

    def wait(ids: torch.LongTensor) -> None:
        may_write.wait()

    def pass_on(ids: torch.LongTensor) -> None:
        arriving.put(int(ids[0, -1]))
        may_write.wait()

    for part, do in (("thinker", wait), ("talker", pass_on)):
        name = f"{part}_stopping_criteria"
        criteria = [*generate_kwargs.get(name, ()), EachToken(stopped, do)]
        generate_kwargs[name] = StoppingCriteriaList(criteria)

    def answer() -> torch.LongTensor:
        generate = partial(generate_overlapped, model) if overlap else model.generate
        try:
            return generate(speaker=speaker, **generate_kwargs)[0]
        finally:
            arriving.put(None)

    with _codes_only(model.token2wav, whole), ThreadPoolExecutor(1) as pool:
        answering = pool.submit(contextvars.copy_context().run, answer)  # with the settings of this thread
        try:
            # `generate` decides whether the last token is spoken, so each token waits for the next.
            waiting, fed, is_heard = [], 0, False
            while (code := arriving.get()) is not None:
                ready, waiting = waiting, [code]
                fed += len(ready)
                if not is_heard:
                    may_write.clear()
                for block in sound.feed(ready):
                    is_heard = True
                    may_write.set()
                    yield block
                may_write.set()
            sequences = answering.result()
            yield from sound.feed(whole[fed:], is_end=True)
            return sequences
        finally:
            stopped.set()
            may_write.set()


@contextmanager
def _codes_only(token2wav: PreTrainedModel, codes: list[int]) -> Iterator[None]:
    """Make `token2wav(codes, ...)`, which `generate` calls last, record the codec tokens and make no sound."""

    def note(code: torch.LongTensor, **_: Any) -> torch.Tensor:
        codes.extend(code[0].tolist())
        return torch.empty(0)

    with Replacement(token2wav, "forward", note):
        yield
