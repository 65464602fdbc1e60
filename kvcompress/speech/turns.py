"""The measurements: cold starts in new processes, then warm rounds in which the strategies take turns."""

import argparse
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import Any

import torch
from torch._inductor import config as inductor_config
from transformers import ProcessorMixin, Qwen2_5OmniForConditionalGeneration

from ..bench.grid import garbage_left, release
from ..bench.results import Results, say
from . import answering
from .prompts import bundled_prompts, growing_wav, model_inputs, read_prompts
from .strategies import CacheStrategy


def cold(results: Results, given: argparse.Namespace) -> None:
    """Run every strategy's cold starts, each with the next prompt, before this process uses the device's memory."""
    for place in range(given.cold):
        for strategy in given.strategies:
            if results.has("cold", strategy=strategy, prompt=place):
                continue
            say(f"cold start {place + 1} of {given.cold}: {strategy}")
            row = in_a_fresh_process(cold_start, given, strategy, place)
            results.add("cold", {"strategy": strategy, "prompt": place, "answer": row})


def in_a_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    ignore = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to this process, which ends the other
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=signal.signal, initargs=ignore) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except KeyboardInterrupt:
            for process in active_children():
                process.kill()
            raise


def cold_start(given: argparse.Namespace, strategy: str, place: int) -> dict[str, Any]:
    """Answer prompt number `place` as the first answer of this process, which must be new."""
    loaded = load(given)
    inputs = loaded.inputs[place % len(loaded.inputs)]
    contender = loaded.strategy(strategy, given).room_for(inputs["input_ids"].shape[1])
    with inductor_config.patch(force_disable_caches=True):  # code compiled by an earlier process would not be cold
        return attempt(contender, inputs)


def warm(results: Results, given: argparse.Namespace) -> None:
    """Run an uncounted round to warm up, in which every strategy answers every prompt, and then the repeats.

    The strategies take turns at each prompt, each time starting with another one.
    """
    loaded = load(given)
    results.content["weight_bytes"] = answering.weight_bytes(loaded.model)
    results.content["prompts"] = loaded.prompts
    longest = max(inputs["input_ids"].shape[1] for inputs in loaded.inputs)
    strategies = {name: loaded.strategy(name, given).room_for(longest) for name in given.strategies}
    names, turn = list(strategies), 0
    # Every compiled strategy keeps its own graphs of the same code, and may need one more for another prompt.
    with torch._dynamo.config.patch(recompile_limit=4 * len(strategies) * len(loaded.inputs)):
        for repeat in range(given.repeats + 1):
            if repeat and results.has("warm", repeat=repeat):
                continue
            say(f"turn {repeat} of {given.repeats}" if repeat else "warming up")
            answers = []
            for place, inputs in enumerate(loaded.inputs):
                begin, turn = turn % len(names), turn + 1
                with garbage_left():
                    for name in names[begin:] + names[:begin]:
                        with ExitStack() as stack:
                            hear, saved = None, {}
                            if given.save_audio and repeat == given.repeats and loaded.model.has_talker:
                                file = given.save_audio / f"{name}-{place}.wav"
                                hear = stack.enter_context(growing_wav(file))
                                saved = {"wav": os.path.relpath(file, given.out.parent)}
                            row = attempt(strategies[name], inputs, hear)
                        answers.append({"strategy": name, "prompt": place, **saved, **row})
            if repeat:
                results.add("warm", {"repeat": repeat, "answers": answers})


@dataclass(frozen=True)
class Loaded:
    """A loaded model with its prompts: `inputs` from the processor, and `prompts` described for JSON."""

    model: Qwen2_5OmniForConditionalGeneration
    processor: ProcessorMixin
    inputs: list[dict[str, torch.Tensor]]
    prompts: list[dict[str, Any]]

    def strategy(self, name: str, given: argparse.Namespace) -> CacheStrategy:
        return CacheStrategy(name, self.model, self.processor.tokenizer, given)


def load(given: argparse.Namespace) -> Loaded:
    torch.set_num_threads(given.threads)
    model, processor = answering.load(given.model, given.dtype, torch.device(given.device), given.without)
    rate = processor.feature_extractor.sampling_rate
    if given.prompts is None:
        prompts = bundled_prompts(rate, given.without)
    else:
        prompts = read_prompts(given.prompts, rate, given.without)
    inputs = [model_inputs(processor, prompt, model.device) for prompt in prompts]
    return Loaded(model, processor, inputs, [prompt.in_words(rate) for prompt in prompts])


def attempt(
    strategy: CacheStrategy, inputs: dict[str, torch.Tensor], hear: Callable[[torch.Tensor], object] | None = None
) -> dict[str, Any]:
    """Return a row, or {"error"} if memory ran out."""
    try:
        return strategy.answer(inputs, hear)
    except torch.OutOfMemoryError:
        pass  # the exception holds on to the tensors until here
    release()
    return {"error": "out of memory"}
