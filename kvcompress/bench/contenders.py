"""The contenders of the benchmark: kvcompress with a method, transformers' own caches, and kvpress in its own Python.

All run the same greedy loop (standalone.py) through the model's own forward, with the same weights and tokens.
"""

import json
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig, DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache

from ..cache.cache import CompressedCache
from ..cache.layer import nbytes_of
from ..device import peak_memory, reset_peak_memory
from ..errors import KVCompressError
from ..hooks.session import attach
from ..methods import method_info
from ..policy.make import make_policy
from .standalone import CLOCKS, decode, prompt_ids, read_prompt

WARM_STEPS = 4  # uncounted steps of a compiled contender in each turn: the first ones record CUDA graphs


@dataclass(frozen=True)
class Turn:
    """The measurements of one answer.

    Attributes:
        prompt_ms: the prefill, with scoring and compression, up to the first new token.
        step_ms: each decode step; for a compiled contender after `WARM_STEPS` others.
        scoring_ms: the part of the prefill spent on scoring, choosing and storing; None if it was not timed.
        kv_bytes: bytes allocated for keys and values (for ours also their index) at the end.
        peak_bytes: as `Measurement.peak_memory_bytes`; None if unknown.
    """

    prompt_ms: float
    step_ms: list[float]
    kv_bytes: int
    peak_bytes: int | None
    scoring_ms: float | None = None


@dataclass(frozen=True)
class Workload:
    """A cell of the grid: prompts of `length` tokens, `batch` at once, each followed by `steps` decode steps.

    With `one_prompt` a single row is prefilled and its cache is repeated `batch` times.
    """

    length: int
    batch: int
    steps: int
    clock: str
    one_prompt: bool = False


@dataclass(frozen=True)
class MethodSpec:
    """A method as written on the command line, `snapkv` or `snapkv:window_size=64`, and its ratio (None for full)."""

    name: str
    ratio: float | None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, ratio: float | None) -> "MethodSpec":
        """Parse a method; `full` never has a ratio.

        Raises KVCompressError for what `make_policy` rejects, and for methods that need images."""
        name, *given = text.split(":")
        ratio = None if name == "full" else ratio
        options = {}
        for option in given:
            key, is_pair, value = option.partition("=")
            if not is_pair:
                raise KVCompressError(f"in {text!r}, {option!r} is not NAME=VALUE")
            if key in ("method", "ratio"):
                raise KVCompressError(f"in {text!r}, {option!r} is not an option of a method")
            if key in options:
                raise KVCompressError(f"in {text!r}, {key}= is given twice")
            options[key] = None if value == "None" else value
        policy = make_policy(name, ratio, **options)
        if policy.tokens is not None:
            raise KVCompressError(f"method {name!r} drops vision tokens, and the bench's prompts have none")
        if policy.passages:
            raise KVCompressError("protect_text= needs a tokenizer, which evaluations and kvcompress.compress pass on")
        published = method_info(policy.method).presets.get(options.pop("preset", None), {})
        kept = [key for key in published if key in options or policy.options.get(key) is not None]
        named = [key for key in dict.fromkeys((*kept, *options)) if key not in ("ratio", "budget")]
        return cls(policy.method, ratio, {key: policy.options[key] for key in named})

    def __str__(self) -> str:
        options = "".join(f":{key}={value}" for key, value in self.options.items())
        return self.name + options + ("" if self.ratio is None else f"@{self.ratio:.15g}")

    def cache(self, config: PreTrainedConfig, room: int) -> CompressedCache:
        """Return an empty cache for a model's config, with room for `room` new tokens."""
        return CompressedCache(config, self.name, self.ratio, max_new_tokens=room, **self.options)

    @property
    def is_static(self) -> bool:
        return "static" in self.options.get("cache_implementation", "dynamic")


def compile_config(device: torch.device) -> CompileConfig:
    """Return transformers' default on CUDA (CUDA graphs); on a CPU the same path without graphs."""
    if device.type == "cuda":
        return CompileConfig()
    config = CompileConfig(fullgraph=True, mode="default")
    config._compile_all_devices = True
    return config


class Local:
    """A contender that runs in this process.

    Attributes:
        compiled: whether its decode step is compiled.
        holds_memory: whether it holds its cache from turn to turn, until it is told to `let_go`.
    """

    holds_memory = False

    def __init__(self, model: PreTrainedModel, name: str, compiled: bool):
        self.model, self.compiled = model, compiled
        self.name = f"{name}, compiled" if compiled else name
        self.warm = WARM_STEPS if compiled else 0

    def let_go(self) -> None:
        """Free what is held from turn to turn."""

    def answer(
        self, cache: Any, held: Callable[[], int], workload: Workload, scoring: "ScoringTimer | None" = None
    ) -> Turn:
        """Answer with an empty cache; `held` counts its bytes at the end."""
        model = self.model
        ids = prompt_ids(model, 1 if workload.one_prompt else workload.batch, workload.length)
        reset_peak_memory(model.device)
        if workload.one_prompt and isinstance(cache, StaticCache):
            row = DynamicCache(config=model.config)
            token, prompt_ms = read_prompt(model, row, ids, workload.clock)
            for layer_idx, layer in enumerate(row.layers):
                rows = (states.expand(workload.batch, -1, -1, -1) for states in (layer.keys, layer.values))
                cache.update(*rows, layer_idx)
            del row
        else:
            token, prompt_ms = read_prompt(model, cache, ids, workload.clock)
        if scoring is not None:
            scoring.stop()
        if workload.one_prompt:
            if not isinstance(cache, StaticCache):
                cache.batch_repeat_interleave(workload.batch)
            token = token.repeat(workload.batch, 1)
        step = model.get_compiled_call(compile_config(model.device)) if self.compiled else model
        step_ms = decode(step, cache, token, workload.length, self.warm + workload.steps, workload.clock)[self.warm :]
        return Turn(prompt_ms, step_ms, held(), peak_memory(model.device))


class Ours(Local):
    """kvcompress: a `CompressedCache` with room for the answer."""

    def __init__(self, model: PreTrainedModel, method: MethodSpec, compiled: bool = False):
        super().__init__(model, str(method), compiled)
        self.method = method

    def turn(self, workload: Workload) -> Turn:
        cache = self.method.cache(self.model.config, workload.steps + 1 + self.warm)
        elsewhere = cache.policy.cluster.second_pass or cache.policy.needs_sums  # the attention may compute the sums
        scoring = None if elsewhere else ScoringTimer(cache, self.model.device, workload.clock)
        with attach(self.model):
            turn = self.answer(cache, lambda: cache.nbytes, workload, scoring)
        return turn if scoring is None else replace(turn, scoring_ms=scoring.milliseconds())


class ScoringTimer:
    """Times the scoring, choosing and storing of a prompt's entries.

    These are a few per cent of a prefill, less than the variation between passes, so they cannot be measured as the
    difference of two."""

    def __init__(self, cache: CompressedCache, device: torch.device, clock: str):
        self._clock, self._device = CLOCKS[clock], device
        self._spans: list[tuple[Any, Any]] = []
        self._layers = [layer.listen(lambda _, compress: self._time(compress)) for layer in cache.compressed_layers]
        self._cache, self._finish = cache, cache.finish
        cache.finish = lambda: self._time(self._finish)

    def stop(self) -> None:
        """Stop timing after the prompt and restore the cache."""
        for listening in self._layers:
            listening.remove()
        del self._cache.finish

    def milliseconds(self) -> float:
        """Return the total of all spans; the device must be synchronised."""
        if self._device.type == "cuda":
            return sum(start.elapsed_time(end) for start, end in self._spans)
        return sum(end - start for start, end in self._spans) * 1e3

    def _time(self, call: Callable[[], None]) -> None:
        start = self._now()
        call()
        self._spans.append((start, self._now()))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # by default that of the current device
        return event


class Transformers(Local):
    """transformers' DynamicCache, or StaticCache with room for prompt and answer.

    One StaticCache serves all turns of a workload if its steps are compiled: a graph depends on the addresses of its
    tensors, so a new cache would be compiled again in every turn.
    """

    def __init__(self, model: PreTrainedModel, kind: str, compiled: bool = False):
        super().__init__(model, f"transformers {kind}", compiled)
        self.kind, self.holds_memory = kind, kind == "StaticCache" and compiled
        self._static: tuple[Workload, StaticCache] | None = None

    def turn(self, workload: Workload) -> Turn:
        cache = DynamicCache(config=self.model.config) if self.kind == "DynamicCache" else self._reset_for(workload)
        return self.answer(cache, lambda: nbytes_of(cache.layers), workload)

    def let_go(self) -> None:
        self._static = None

    def _reset_for(self, workload: Workload) -> StaticCache:
        if self._static is None or self._static[0] != workload:
            self._static = None  # frees the previous one's memory
            room = workload.length + workload.steps + self.warm
            self._static = workload, StaticCache(config=self.model.config, max_cache_len=room)
        else:
            self._static[1].reset()
        cache = self._static[1]
        if not self.compiled:
            self._static = None
        return cache


class KVPressProcess:
    """Context manager that runs kvpress_worker.py under another Python.

    Attributes:
        presses: our names of the methods that kvpress has -> the options with which ours choose the same entries.
        versions: the versions of kvpress, transformers and torch there.
    """

    WORKER = Path(__file__).with_name("kvpress_worker.py")

    def __init__(self, python: str, source: dict[str, Any], dtype: str, device: str, threads: int):
        command = [python, str(self.WORKER)]
        try:
            # In its own session: Ctrl-C then reaches only this process, which ends it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        except OSError as error:
            raise KVCompressError(f"--kvpress-python {python!r} cannot be run: {error.strerror}") from None
        try:
            hello = self.ask({"source": source, "dtype": dtype, "device": device, "threads": threads})
        except BaseException as error:
            self.__exit__(type(error))
            raise
        self.presses, self.versions = hello["presses"], hello["versions"]

    def has(self, method: MethodSpec) -> bool:
        """Return whether kvpress has the method with the given options."""
        return method.name in self.presses and method.options.items() <= self.presses[method.name].items()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one message and wait for its reply. Raises KVCompressError if the process ended instead."""
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise KVCompressError(f"the kvpress process ended with status {self._process.wait()}; see its output above")
        return json.loads(line)

    def __enter__(self) -> "KVPressProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None:  # it may be in the middle of a turn
            self._process.kill()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class KVPress:
    """kvpress with the press for one of our methods, its own defaults and the same ratio."""

    holds_memory = False

    def __init__(self, process: KVPressProcess, method: MethodSpec):
        self.process, self.method = process, method
        self.name = f"kvpress {method}"

    def turn(self, workload: Workload) -> Turn:
        reply = self.process.ask({"method": self.method.name, "ratio": self.method.ratio, **asdict(workload)})
        if "error" in reply:
            raise torch.OutOfMemoryError(reply["error"])
        return Turn(**reply)


Contender = Ours | Transformers | KVPress


def make_contenders(
    model: PreTrainedModel,
    methods: Iterable[MethodSpec],
    peers: Iterable[str],
    compiled: bool,
    process: KVPressProcess | None,
) -> dict[str, Contender]:
    """Return all contenders by name: the peers (`dynamic`, `static`), our methods, and kvpress for each method it has.

    `compiled` adds a compiled contender for each cache of fixed shape."""
    contenders: list[Contender] = []
    if "dynamic" in peers:
        contenders.append(Transformers(model, "DynamicCache"))
    if "static" in peers:
        contenders += [Transformers(model, "StaticCache", how) for how in ((False, True) if compiled else (False,))]
    for method in methods:
        contenders.append(Ours(model, method))
        if compiled and method.is_static:
            contenders.append(Ours(model, method, compiled=True))
        if process is not None and process.has(method):
            contenders.append(KVPress(process, method))
    return {contender.name: contender for contender in contenders}
