"""`python -m kvcompress speech`: how soon an omni model speaks, with several KV caches side by side."""

import argparse
import json
import shlex
import statistics
import wave
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch._inductor import config as inductor_config
from transformers import (
    Cache,
    CompileConfig,
    DynamicCache,
    ProcessorMixin,
    Qwen2_5OmniForConditionalGeneration,
    StaticCache,
)

from .. import speech
from ..cache.cache import CompressedCache
from ..errors import KVCompressError, unknown_name
from ..hooks.session import attach
from ..methods import method_info
from ..policy.policy import make_policy
from ..tokens.base import TokenMethod
from .cli import positive, say
from .grid import Results, garbage_left, release
from .standalone import held_bytes
from .timing import cell, environment, short, summary, table
from .ways import Method, compile_config

# name -> (whether our method compresses, whether the shapes are fixed)
STRATEGIES = {
    "dynamic": (False, False),
    "static": (False, True),
    "compressed": (True, False),
    "compressed-static": (True, True),
}
# Without this system prompt the model is not meant to speak (model card).
SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)


def parser() -> argparse.ArgumentParser:
    this = argparse.ArgumentParser(
        prog="python -m kvcompress speech",
        description="Time to first audio and real-time factor of Qwen2.5-Omni, cold and warm, with several KV caches.",
    )
    this.add_argument("model", help="hub id or local path")
    this.add_argument("method", metavar="METHOD[:OPTION=VALUE...]")
    this.add_argument("ratio", type=float)
    this.add_argument("--strategies", nargs="+", default=list(STRATEGIES), help=f"of {', '.join(STRATEGIES)}")
    this.add_argument("--no-compile", dest="compile", action="store_false", help="static caches without compiling")
    this.add_argument("--compress-talker", action="store_true", help="the method compresses the talker's cache, too")
    this.add_argument("--without", nargs="+", default=[], metavar="PART", help=f"of {', '.join(speech.PARTS)}")
    this.add_argument(
        "--prompts", type=Path, metavar="JSONL", help='{"text":, "image": FILE, "audio": WAV FILE} a line'
    )
    this.add_argument("--text-tokens", type=positive, default=128, help="the longest text")
    this.add_argument("--codec-tokens", type=positive, default=1024, help="the longest speech, 50 tokens a second")
    this.add_argument("--exact", action="store_true", help="every answer has exactly these lengths")
    this.add_argument("--repeats", type=positive, default=3, help="warm answers to each prompt, per strategy")
    this.add_argument("--cold", type=int, default=3, help="cold starts per strategy, each a process; 0: none")
    this.add_argument("--speaker", help="default: the checkpoint's first")
    this.add_argument("--seed", type=int, default=0)
    this.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    this.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    this.add_argument("--threads", type=positive, default=torch.get_num_threads())
    this.add_argument("--save-audio", type=Path, metavar="FOLDER", help="the last warm answers, to listen to")
    this.add_argument("--out", type=Path, default=Path("speech"), help="without a suffix: .json and .md")
    this.add_argument("--resume", action="store_true", help="keep what is in the .json")
    return this


@dataclass(frozen=True)
class Prompt:
    """image: RGB; audio: float32 (samples,) at the rate that the processor wants."""

    text: str
    image: Image.Image | None = None
    audio: np.ndarray | None = None


def bundled_prompts(rate: int, without: list[str]) -> list[Prompt]:
    """Text alone, with a picture, with sound, and with both, as far as the parts are there. Drawn here: how long a
    model takes does not depend on what it sees, but on how much."""
    picture = Image.new("RGB", (560, 420), "lightblue")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 280, 560, 420), fill="green")
    draw.ellipse((220, 60, 340, 180), fill="yellow")
    seconds = np.arange(3 * rate, dtype=np.float32) / rate
    melody = (0.3 * np.sin(2 * np.pi * np.choose(seconds.astype(int), [440, 554, 659]) * seconds)).astype(np.float32)
    prompts = [
        Prompt("Please tell me in two sentences why the sky is blue."),
        Prompt("What is in this picture? Answer in two sentences.", image=picture),
        Prompt("What do you hear? Answer in two sentences.", audio=melody),
        Prompt("Does the sound go with the picture? Answer in two sentences.", image=picture, audio=melody),
    ]
    return [prompt for prompt in prompts if not missing_part(prompt, without)]


def missing_part(prompt: Prompt, without: list[str]) -> str | None:
    """The part that the prompt needs and that is left out."""
    needed = {"vision": prompt.image is not None, "audio": prompt.audio is not None}
    return next((part for part in without if needed.get(part)), None)


def read_prompts(file: Path, rate: int, without: list[str]) -> list[Prompt]:
    """Of a JSONL file; image and sound files are looked for beside it. Raises KVCompressError, which names the line."""
    prompts = []
    for number, line in enumerate(_lines(file), 1):
        where = f"{file}:{number}"
        try:
            given = json.loads(line)
        except json.JSONDecodeError as error:
            raise KVCompressError(f"{where}: {error}") from None
        if not isinstance(given, dict) or set(given) - {"text", "image", "audio"} or "text" not in given:
            raise KVCompressError(f"{where} needs text, and may have image and audio: {line.strip()[:80]}")
        image = file.parent / given["image"] if given.get("image") else None
        sound = file.parent / given["audio"] if given.get("audio") else None
        for media in (image, sound):
            if media is not None and not media.is_file():
                raise KVCompressError(f"{where}: there is no file {media}")
        prompt = Prompt(given["text"], image and read_image(image), None if sound is None else read_wav(sound, rate))
        if part := missing_part(prompt, without):
            raise KVCompressError(f"{where} needs {speech.PARTS[part]}, which --without {part} leaves out")
        prompts.append(prompt)
    if not prompts:
        raise KVCompressError(f"{file} has no prompts")
    return prompts


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise KVCompressError(f"--prompts {file}: {error.strerror}") from None


def read_image(file: Path) -> Image.Image:
    try:
        return Image.open(file).convert("RGB")
    except OSError:
        raise KVCompressError(f"{file} is not a picture") from None


def read_wav(file: Path, rate: int) -> np.ndarray:
    """float32 (samples,) of 16-bit PCM, channels averaged. Raises KVCompressError for another format or rate."""
    try:
        with wave.open(str(file)) as sound:
            found, width, channels = sound.getframerate(), sound.getsampwidth(), sound.getnchannels()
            frames = sound.readframes(sound.getnframes())
    except (wave.Error, EOFError) as error:
        raise KVCompressError(f"{file} is not a WAV file: {error}") from None
    if (found, width) != (rate, 2):
        raise KVCompressError(
            f"{file} has {found} Hz and {8 * width} bits; {rate} Hz and 16 bits are needed "
            f"(ffmpeg -i {file.name} -ar {rate} -c:a pcm_s16le OUT.wav)"
        )
    return np.frombuffer(frames, "<i2").reshape(-1, channels).mean(1).astype(np.float32) / 32768


def write_wav(file: Path, waveform: torch.Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(file), "wb") as sound:
        sound.setparams((1, 2, speech.SAMPLING_RATE, len(waveform), "NONE", ""))
        sound.writeframes((waveform.clamp(-1, 1) * 32767).to(torch.int16).numpy().tobytes())


def model_inputs(processor: ProcessorMixin, prompt: Prompt, device: torch.device) -> dict[str, torch.Tensor]:
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


class Way:
    """One cache strategy on one model.

    Attributes:
        method: ours, None where transformers' own cache is used.
    """

    def __init__(self, strategy: str, loaded: "Loaded", given: argparse.Namespace):
        self.model, self.tokenizer, self.given = loaded.model, loaded.processor.tokenizer, given
        self.compresses, self.is_static = STRATEGIES[strategy]
        self.method = method_of(strategy, given) if self.compresses else None
        self._static: StaticCache | None = None

    def room_for(self, longest: int) -> "Way":
        """Prepare for prompts of at most `longest` tokens: transformers' static cache has one shape for all."""
        if self.is_static and not self.compresses:
            self._static = StaticCache(self.model.thinker.config, max_cache_len=longest + self.given.text_tokens)
        return self

    def answer(self, inputs: dict[str, torch.Tensor]) -> tuple[dict[str, Any], speech.Answer]:
        """A row of numbers, and the answer itself."""
        model, given = self.model, self.given
        cache = self._cache()
        talker_cache = self._talker_cache() if model.has_talker else None
        with ExitStack() as stack:
            for part, its_cache in ((model.thinker, cache), (getattr(model, "talker", None), talker_cache)):
                if isinstance(its_cache, CompressedCache):
                    stack.enter_context(attach(part))
            answer = speech.answer(
                model,
                inputs,
                given.text_tokens,
                given.codec_tokens,
                given.exact,
                given.speaker,
                given.seed,
                cache,
                talker_cache,
                self._compile_config() if self.is_static and given.compile else None,
            )
        row = asdict(replace(answer, waveform=None))
        del row["waveform"]
        row |= {
            "text": self.tokenizer.decode(answer.text, skip_special_tokens=True),
            "text_tokens": len(answer.text),
            "prompt_tokens": inputs["input_ids"].shape[1],
            "audio_s": answer.audio_s,
            "real_time_factor": answer.real_time_factor,
            "kv_bytes": _nbytes(cache),
            "talker_kv_bytes": None if talker_cache is None else _nbytes(talker_cache),
            "realised_ratio": None,
        }
        if isinstance(cache, CompressedCache):
            row["realised_ratio"] = statistics.mean(layer[0] for layer in cache.realised_ratios())
        return row, answer

    def _compile_config(self) -> CompileConfig:
        config = compile_config(self.model.device)
        if self.model.has_talker:  # CUDA graphs would write over the hidden states that the talker reads in the end
            config.mode = "default"
        return config

    def _cache(self) -> Cache:
        config = self.model.thinker.config
        if self.compresses:
            return self._compressed(config, self.method, self.given.text_tokens)
        if self._static is not None:
            self._static.reset()
            return self._static
        return DynamicCache(config=config)

    def _talker_cache(self) -> Cache:
        config = self.model.talker.config
        if self.compresses and self.given.compress_talker:  # as METHOD says; transformers' talker takes no static cache
            return self._compressed(config, method_of("compressed", self.given), self.given.codec_tokens)
        return DynamicCache(config=config)

    def _compressed(self, config: Any, method: Method, tokens: int) -> CompressedCache:
        return CompressedCache(config, method.name, method.ratio, max_new_tokens=tokens + 1, **method.options)


def _nbytes(cache: Cache) -> int:
    return cache.nbytes if isinstance(cache, CompressedCache) else held_bytes(cache)


def method_of(strategy: str, given: argparse.Namespace) -> Method:
    """The method as a strategy that compresses uses it. Raises KVCompressError."""
    info = method_info(given.method.split(":")[0])
    if issubclass(info.cls, TokenMethod):
        raise KVCompressError(f"method {info.name!r} drops tokens of the prompt, and the talker reads all of them")
    method = Method.parse(given.method, given.ratio)
    if STRATEGIES[strategy][1]:
        method = replace(method, options={**method.options, "cache_implementation": "static"})
    return method


def check(given: argparse.Namespace) -> None:
    """Raises KVCompressError for everything that can be told before the model is loaded."""
    for strategy in given.strategies:
        if strategy not in STRATEGIES:
            raise unknown_name("there is no strategy", strategy, STRATEGIES)
    for part in given.without:
        if part not in speech.PARTS:
            raise unknown_name("there is no part", part, speech.PARTS)
    speaks = "speech" not in given.without
    if speaks and given.text_tokens < speech.FEWEST_TEXT_TOKENS:
        raise KVCompressError(f"--text-tokens {given.text_tokens}: at least {speech.FEWEST_TEXT_TOKENS} can be spoken")
    for strategy in ["compressed", *given.strategies]:
        if not STRATEGIES[strategy][0]:
            continue
        method = method_of(strategy, given)
        policy = make_policy(method.name, method.ratio, **method.options)
        if speaks:
            speech.check_policy(policy)
        if speaks and given.compress_talker and policy.cluster.second_pass:
            raise KVCompressError(f"--compress-talker: method {method.name!r} reads the prompt again, a talker cannot")
        if speaks and given.compress_talker and strategy == "compressed" and method.is_static:
            raise KVCompressError("--compress-talker: transformers' talker takes no static cache")


@dataclass(frozen=True)
class Loaded:
    """inputs: what the processor made of each prompt."""

    model: Qwen2_5OmniForConditionalGeneration
    processor: ProcessorMixin
    inputs: list[dict[str, torch.Tensor]]


def load(given: argparse.Namespace) -> Loaded:
    torch.set_num_threads(given.threads)
    model, processor = speech.load(given.model, given.dtype, torch.device(given.device), given.without)
    rate = processor.feature_extractor.sampling_rate
    if given.prompts is None:
        prompts = bundled_prompts(rate, given.without)
    else:
        prompts = read_prompts(given.prompts, rate, given.without)
    return Loaded(model, processor, [model_inputs(processor, prompt, model.device) for prompt in prompts])


def attempt(way: Way, inputs: dict[str, torch.Tensor]) -> tuple[dict[str, Any], speech.Answer | None]:
    """A row and an answer; {"error"} and None where memory ran out."""
    try:
        return way.answer(inputs)
    except torch.OutOfMemoryError:
        pass  # until here the exception holds on to the tensors
    release()
    return {"error": "out of memory"}, None


def cold_start(given: argparse.Namespace, strategy: str, place: int) -> dict[str, Any]:
    """The first answer of this process, which has to be a fresh one, to prompt number `place`."""
    loaded = load(given)
    inputs = loaded.inputs[place % len(loaded.inputs)]
    way = Way(strategy, loaded, given).room_for(inputs["input_ids"].shape[1])
    with inductor_config.patch(force_disable_caches=True):  # what an earlier process compiled would not be cold
        return attempt(way, inputs)[0]


def in_a_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def cold(results: Results, given: argparse.Namespace) -> None:
    """Every strategy's cold starts, each with the next prompt; before this process takes the device's memory."""
    for place in range(given.cold):
        for strategy in given.strategies:
            if results.has("cold", strategy=strategy, prompt=place):
                continue
            say(f"cold start {place + 1} of {given.cold}: {strategy}")
            row = in_a_fresh_process(cold_start, given, strategy, place)
            results.add("cold", {"strategy": strategy, "prompt": place, "answer": row})


def warm(results: Results, given: argparse.Namespace) -> None:
    """A round in which every strategy answers every prompt warms up and is not counted; then follow the repeats. The
    strategies take turns at each prompt, each time beginning with another."""
    loaded = load(given)
    results.content["weight_bytes"] = speech.weight_bytes(loaded.model)
    longest = max(inputs["input_ids"].shape[1] for inputs in loaded.inputs)
    ways = {strategy: Way(strategy, loaded, given).room_for(longest) for strategy in given.strategies}
    names, turn = list(ways), 0
    # Every compiled way keeps graphs of its own, of the same code, and may need one more for another prompt.
    with torch._dynamo.config.patch(recompile_limit=4 * len(ways) * len(loaded.inputs)):
        for repeat in range(given.repeats + 1):
            if repeat and results.has("warm", repeat=repeat):
                continue
            say(f"turn {repeat} of {given.repeats}" if repeat else "warming up")
            answers = []
            for place, inputs in enumerate(loaded.inputs):
                begin, turn = turn % len(names), turn + 1
                with garbage_left():
                    for name in names[begin:] + names[:begin]:
                        row, answer = attempt(ways[name], inputs)
                        answers.append({"strategy": name, "prompt": place, **row})
                        if given.save_audio and repeat == given.repeats and answer and answer.waveform is not None:
                            write_wav(given.save_audio / f"{name}-{place}.wav", answer.waveform)
            if repeat:
                results.add("warm", {"repeat": repeat, "answers": answers})


# Label -> the field of a row and how many of it are one unit.
COLUMNS = {
    "first text s": ("first_text_s", 1),
    "text s": ("text_s", 1),
    "first codec token s": ("first_code_s", 1),
    "first audio s": ("first_audio_s", 1),
    "real-time factor": ("real_time_factor", 1),
}
COUNTS = {
    "audio s": ("audio_s", 1),
    "text tokens": ("text_tokens", 1),
    "kept": ("realised_ratio", 1),
    "KV MB": ("kv_bytes", 1e6),
    "talker KV MB": ("talker_kv_bytes", 1e6),
    "peak MB": ("peak_memory_bytes", 1e6),
}


def rows_of(content: dict[str, Any]) -> list[list[str]]:
    """The table: one row per start and strategy; times as median (quartiles), the rest as medians."""
    starts = {
        "cold": [{"strategy": taken["strategy"], **taken["answer"]} for taken in content["cold"]],
        "warm": [row for taken in content["warm"] for row in taken["answers"]],
    }
    rows = []
    for start, answers in starts.items():
        for strategy in content["settings"]["strategies"]:
            mine = [row for row in answers if row["strategy"] == strategy]
            if not mine:
                continue
            good = [row for row in mine if "error" not in row]
            label = content["settings"]["labels"][strategy] + ("" if len(good) == len(mine) else " (out of memory)")
            row = [start, label, str(len(good))]
            for field, unit in COLUMNS.values():
                numbers = [one[field] / unit for one in good if one[field] is not None]
                row.append(cell(summary(numbers)) if numbers else "")
            for field, unit in COUNTS.values():
                numbers = [one[field] / unit for one in good if one[field] is not None]
                row.append(short(statistics.median(numbers)) if numbers else "")
            rows.append(row)
    return rows


def markdown(content: dict[str, Any]) -> str:
    settings = content["settings"]
    header, rows = ["start", "cache", "answers", *COLUMNS, *COUNTS], rows_of(content)
    used = [place for place in range(len(header)) if any(row[place] for row in rows)]
    weights = ", ".join(f"{name} {short(size / 1e6)}" for name, size in content["weight_bytes"].items() if size)
    lines = [
        f"# {settings['model']}, {settings['dtype']}",
        f"`{content['command']}`",
        "Times are medians (quartiles) over prompts and repeats, in seconds since `generate` was called; the first "
        "audio is there when the whole waveform is. docs/speech.md explains the columns.",
        f"Weights in memory, MB: {weights}.",
        table([header[place] for place in used], [[row[place] for place in used] for row in rows]).rstrip(),
        "Made on " + ", ".join(f"{name} {value}" for name, value in content["environment"].items()) + ".",
    ]
    return "\n\n".join(lines) + "\n"


def labels(given: argparse.Namespace) -> dict[str, str]:
    """strategy -> what the table calls it."""
    compiled = ", compiled" if given.compile else ""
    names = {"dynamic": "transformers DynamicCache", "static": f"transformers StaticCache{compiled}"}
    for strategy in given.strategies:
        if STRATEGIES[strategy][0]:
            names[strategy] = str(method_of(strategy, given)) + (compiled if STRATEGIES[strategy][1] else "")
    return {strategy: names[strategy] for strategy in given.strategies}


def main(arguments: list[str]) -> None:
    """Raises KVCompressError for what is wrong, before anything is loaded where that can be told."""
    given = parser().parse_args(arguments)
    check(given)
    elsewhere = ("out", "resume", "save_audio", "repeats", "cold")  # they may change where a run goes on
    settings = {
        **{name: value for name, value in vars(given).items() if name not in elsewhere},
        "prompts": given.prompts and str(given.prompts),
        "labels": labels(given),
    }
    content = {
        "command": shlex.join(["python", "-m", "kvcompress", "speech", *arguments]),
        "settings": settings,
        "environment": environment(torch.device(given.device)),
    }
    results = Results(given.out.with_suffix(".json"), content, given.resume, parts=("cold", "warm"))
    cold(results, given)
    warm(results, given)
    text = markdown(results.content)
    given.out.with_suffix(".md").write_text(text)
    print(text)
