"""Omni models that speak (Qwen2.5-Omni): load the needed parts, answer aloud, and time the answer.

Three models work together. The thinker, a Qwen2 with a vision and an audio tower, reads the prompt and writes text. The
talker reads the thinker's hidden states and writes codec tokens, either after all text, as in transformers, or while
the thinker still writes (overlapped.py). token2wav turns codec tokens into a waveform, either all at once, as in
transformers, or window by window while the talker still writes (streaming.py).
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import (
    AutoConfig,
    AutoProcessor,
    Cache,
    CompileConfig,
    ProcessorMixin,
    Qwen2_5OmniForConditionalGeneration,
    StoppingCriteriaList,
)

from ..cache_name import CACHE
from ..device import now, peak_memory, reset_peak_memory
from ..errors import KVCompressError, loading, unknown_name
from ..measure import TokenTimes
from .kinds import PARTS
from .overlapped import FEWEST_TEXT_TOKENS, generate_overlapped
from .streaming import Window, known_speaker, stream

MODEL_TYPE = "qwen2_5_omni"
SAMPLING_RATE = 24_000  # from the model card; the config does not have it


class PartialOmni(Qwen2_5OmniForConditionalGeneration):
    """The model without warnings about the checkpoint's weights of parts that are left out."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
        r"^talker\.",
        r"^token2wav\.",
        r"\.visual\.",
        r"\.audio_tower\.",
    ]


def load(
    name: str, dtype: str | torch.dtype, device: torch.device, without: Iterable[str] = ()
) -> tuple[Qwen2_5OmniForConditionalGeneration, ProcessorMixin]:
    """Load the model and its processor, without the parts that are not needed.

    Args:
        name: hub id or local folder.
        without: names in `PARTS`. Their weights are not read; a tower's few weights outside its layers are freed
            afterwards.

    Raises:
        KVCompressError: for an unknown part, a model of another type, or one that cannot be found.
    """
    without = set(without)
    for part in without:
        if part not in PARTS:
            raise unknown_name("there is no part", part, PARTS)
    with loading(name):
        config = AutoConfig.from_pretrained(name)
        if config.model_type != MODEL_TYPE:
            raise KVCompressError(f"{name} is a {config.model_type} model; speech is measured for {MODEL_TYPE}")
        if "vision" in without:
            config.thinker_config.vision_config.depth = 0
        if "audio" in without:
            config.thinker_config.audio_config.encoder_layers = 0
        config.enable_audio_output = "speech" not in without
        model = PartialOmni.from_pretrained(name, config=config, dtype=dtype)
        processor = AutoProcessor.from_pretrained(name)
    for part, tower in (("vision", "visual"), ("audio", "audio_tower")):
        if part in without:
            _let_go(model.thinker, tower)
    if model.has_talker:
        model.token2wav.float()  # its `generate` needs this; otherwise the first answer would convert it
    if model.thinker.generation_config.eos_token_id is None:
        model.thinker.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    return model.eval().to(device), processor


def _let_go(thinker: torch.nn.Module, child: str) -> None:
    for module in list(thinker.modules()):
        if child in module._modules:
            setattr(module, child, None)


def weight_bytes(model: Qwen2_5OmniForConditionalGeneration) -> dict[str, int]:
    """Return the bytes of weights in memory, of each part and of the thinker's language model."""
    found = dict.fromkeys(("language model", "vision", "audio", "talker", "token2wav"), 0)
    for name, weight in model.named_parameters():
        top = name.split(".")[0]
        inside = "vision" if ".visual." in name else "audio" if ".audio_tower." in name else "language model"
        found[top if top in found else inside] += weight.numel() * weight.element_size()
    return found


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt. All times are seconds since the call of `generate`, with the device synchronised.

    Attributes:
        text: LongTensor (new,), the thinker's tokens.
        waveform: float32 (samples,) at `SAMPLING_RATE`; None if `hear` received it.
        audio_s: seconds of sound; None without speech, like all fields about speech.
        first_text_s, text_s: time of the thinker's first and last token.
        first_code_s, codes_s: time of the talker's first and last codec token.
        first_audio_s: time of the first sample: in a stream that of the first block, otherwise that of the last sample.
        waveform_s: time of the last sample.
        total_s: time of the whole call.
        underruns: number of blocks that arrived after all earlier sound had been played, for a listener who starts with
            the first block; None if the waveform came in one piece.
        codes: codec tokens, including the one that ends them.
        peak_memory_bytes: as `Measurement.peak_memory_bytes`.
    """

    text: torch.LongTensor
    waveform: torch.Tensor | None
    audio_s: float | None
    first_text_s: float
    text_s: float
    first_code_s: float | None
    codes_s: float | None
    first_audio_s: float | None
    waveform_s: float | None
    total_s: float
    underruns: int | None
    codes: int | None
    peak_memory_bytes: int | None

    @property
    def real_time_factor(self) -> float | None:
        """Seconds of computation per second of sound."""
        return None if self.audio_s is None else self.total_s / self.audio_s


@torch.no_grad()
def answer(
    model: Qwen2_5OmniForConditionalGeneration,
    inputs: dict[str, torch.Tensor],
    text_tokens: int,
    codec_tokens: int,
    exact: bool = False,
    speaker: str | None = None,
    seed: int = 0,
    cache: Cache | None = None,
    talker_cache: Cache | None = None,
    compile_config: CompileConfig | None = None,
    window: Window | None = None,
    overlap: bool = False,
    hear: Callable[[torch.Tensor], object] | None = None,
) -> Answer:
    """Answer one prompt, aloud if the model has its talker.

    The thinker decodes greedily. The talker samples, as is transformers' default, and token2wav starts from noise; both
    depend on the seed.

    Args:
        inputs: the processor's output for one prompt.
        text_tokens, codec_tokens: the most tokens that thinker and talker may write; with `exact` the exact number, so
            that answers with different caches are equally long.
        speaker: a name in the checkpoint's `spk_dict.pt`; None: its first.
        cache, talker_cache: empty caches; None: transformers' own.
        compile_config: how to compile the thinker's decode step, with a static cache.
        window: the window for making sound while the talker writes; None: in one piece, as in transformers.
        overlap: whether the talker starts with the first text tokens; the answer is the same.
        hear: called with each block of sound, float32 (samples,), as soon as it exists; the answer then holds none.

    Raises:
        KVCompressError: for an unknown speaker, and for fewer than two text tokens, which `generate` cannot speak.
    """
    thinker, talker = TokenTimes(), TokenTimes()
    least = FEWEST_TEXT_TOKENS if model.has_talker else 1
    if text_tokens < least:
        raise KVCompressError(f"text_tokens={text_tokens}: speech needs at least {least}")
    for_thinker = {
        "max_new_tokens": text_tokens,
        "min_new_tokens": text_tokens if exact else least,
        "do_sample": False,
        "stopping_criteria": StoppingCriteriaList([thinker]),
        **({} if cache is None else {CACHE: cache}),
        **({} if compile_config is None else {"compile_config": compile_config}),
    }
    for_talker = {
        "max_new_tokens": codec_tokens,
        "min_new_tokens": codec_tokens if exact else 1,
        "stopping_criteria": StoppingCriteriaList([talker]),
        **({} if talker_cache is None else {CACHE: talker_cache}),
    }
    device = inputs["input_ids"].device
    columns = inputs["input_ids"].shape[1]
    heard: list[torch.Tensor] = []
    torch.manual_seed(seed)
    reset_peak_memory(device)
    start = now(device)
    if model.has_talker:
        for_talker["eos_token_id"] = [model.talker.codec_pad_token, model.talker.codec_eos_token]
        given = {
            **_for_thinker_only(inputs),
            **{f"thinker_{name}": value for name, value in for_thinker.items()},
            **{f"talker_{name}": value for name, value in for_talker.items()},
            "speaker": known_speaker(model, speaker),
        }
        if window is None:
            source = _in_one_piece(model, overlap, given)
        else:
            source = stream(model, window=window, seed=seed, overlap=overlap, **given)
        sequences, blocks = _listen(source, start, hear or heard.append)
    else:
        sequences, blocks = model.thinker.generate(**inputs, **for_thinker), []
    total = now(device) - start
    speaks = bool(blocks)
    return Answer(
        text=sequences[0, columns:].cpu(),
        waveform=torch.cat(heard) if heard else None,
        audio_s=sum(samples for _, samples in blocks) / SAMPLING_RATE if speaks else None,
        first_text_s=thinker.times[0] - start,
        text_s=thinker.times[-1] - start,
        first_code_s=talker.times[0] - start if speaks else None,
        codes_s=talker.times[-1] - start if speaks else None,
        first_audio_s=blocks[0][0] if speaks else None,
        waveform_s=blocks[-1][0] if speaks else None,
        total_s=total,
        underruns=underruns([(at, samples / SAMPLING_RATE) for at, samples in blocks]) if window and speaks else None,
        codes=len(talker.times) if speaks else None,
        peak_memory_bytes=peak_memory(device),
    )


def _in_one_piece(
    model: Qwen2_5OmniForConditionalGeneration, overlap: bool, given: dict[str, Any]
) -> Generator[torch.Tensor, None, torch.LongTensor]:
    """Yield the waveform as one block, like `stream`."""
    sequences, waveform = generate_overlapped(model, **given) if overlap else model.generate(**given)
    yield waveform.cpu()
    return sequences


def _listen(
    source: Generator[torch.Tensor, None, torch.LongTensor], start: float, hear: Callable[[torch.Tensor], object]
) -> tuple[torch.LongTensor, list[tuple[float, int]]]:
    """Return a stream's result and, for each block, its time in seconds since `start` and its number of samples."""
    blocks = []
    while True:
        try:
            block = next(source)
        except StopIteration as end:
            return end.value, blocks
        blocks.append((now(block.device) - start, len(block)))  # on the CPU: the talker need not pause
        hear(block)


def underruns(blocks: list[tuple[float, float]]) -> int:
    """Count the blocks that arrive after earlier sound has ended; `blocks` are (arrival, duration) in seconds."""
    silent_from, late = blocks[0][0], 0
    for there, lasts in blocks:
        late += there > silent_from
        silent_from = max(silent_from, there) + lasts
    return late


def _for_thinker_only(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prefix pixels for the thinker: transformers 5.23 also passes them to the talker, which rejects them."""
    pixels = ("pixel_values", "pixel_values_videos")
    return {f"thinker_{name}" if name in pixels else name: value for name, value in inputs.items()}
