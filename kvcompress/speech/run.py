"""Run the speech benchmark: cold starts in new processes, then warm rounds in which the strategies take turns."""

import argparse
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from multiprocessing import active_children, get_context
from typing import Any

import torch
from torch._inductor import config as inductor_config
from transformers import PreTrainedTokenizerBase, Qwen2_5OmniForConditionalGeneration

from ..__main__ import find_command
from ..bench.grid import attempt, garbage_left
from ..bench.results import Results, about, check_files, check_measured, say
from ..device import checked_device
from ..errors import KVCompressError
from ..files import check_output
from ..policy.conflicts import SPEECH, check_conflicts
from ..policy.make import make_policy
from . import answering
from .answering import FEWEST_TEXT_TOKENS
from .kinds import STRATEGIES
from .prompts import bundled_prompts, growing_wav, model_inputs, read_lines, read_prompts
from .report import markdown
from .strategies import CacheStrategy, method_of, talker_method
from .streaming import Window

Inputs = dict[str, torch.Tensor]  # the processor's output for a prompt
OUT_OF_MEMORY = {"error": "out of memory"}


def measure(given: argparse.Namespace, arguments: list[str]) -> int:
    """Run the benchmark given by parsed `arguments` and return the exit code.

    Raises KVCompressError for wrong arguments, if possible before anything is loaded."""
    given.device, given.threads = str(checked_device(given.device)), given.threads or torch.get_num_threads()
    check_measured(torch.device(given.device))
    check(given)
    report = find_command("report") if given.html else None
    if given.html and given.save_audio is None and "speech" not in given.without:
        given.save_audio = given.out.with_name(f"{given.out.stem}-audio")
    check_files(given.out, ".json", ".md", *([".html"] if given.html else []))
    if given.save_audio:
        check_output(given.save_audio)
    elsewhere = ("out", "resume", "save_audio", "html", "repeats", "cold")  # these may change when a run is resumed
    settings = {
        **{name: value for name, value in vars(given).items() if name not in elsewhere},
        "prompts": given.prompts and f"{given.prompts} (SHA-256 {sha256(given.prompts.read_bytes()).hexdigest()[:16]})",
        "labels": labels(given),
        "talker": None if (method := talker_method(given)) is None else str(method),
    }
    content = about(["kvcompress", "speech", *arguments], settings, torch.device(given.device))
    results = Results(given.out.with_suffix(".json"), content, given.resume, parts=("cold", "warm"))
    cold(results, given)
    warm(results, given)
    results.report(markdown(results.content))
    return report([str(results.file)]) if report else 0


def check(given: argparse.Namespace) -> None:
    """Raise KVCompressError for every error that can be found before the model is loaded."""
    if given.prompts is not None:
        read_lines(given.prompts)
    Window(*given.window)
    speaks = "speech" not in given.without
    if speaks and given.text_tokens < FEWEST_TEXT_TOKENS:
        raise KVCompressError(f"--text-tokens {given.text_tokens}: speech needs at least {FEWEST_TEXT_TOKENS}")
    for strategy in ["compressed", *given.strategies]:
        kind = STRATEGIES[strategy]
        if kind.overlaps and not speaks:
            raise KVCompressError(f"strategy {strategy!r} overlaps text and speech, which --without speech leaves out")
        if not kind.compresses:
            continue
        method = method_of(kind, given)
        policy = make_policy(method.name, method.ratio, **method.options)
        if speaks:
            check_conflicts(policy, SPEECH)
    method = talker_method(given) if speaks else None
    if method is not None:
        policy = make_policy(method.name, method.ratio, **method.options)
        if policy.cluster.second_pass:
            raise KVCompressError(
                f"--compress-talker: method {method.name!r} reads the prompt again, which a talker cannot"
            )
        if method.is_static:
            raise KVCompressError("--compress-talker: transformers' talker takes no static cache")


def labels(given: argparse.Namespace) -> dict[str, str]:
    """Return strategy -> its label in the table."""
    compiled = ", compiled" if given.compile else ""
    found = {}
    for strategy in given.strategies:
        kind = STRATEGIES[strategy]
        if kind.compresses:
            name = str(method_of(kind, given))
        else:
            name = f"transformers {'Static' if kind.is_static else 'Dynamic'}Cache"
        found[strategy] = name + (compiled if kind.is_static else "") + (", overlapped" if kind.overlaps else "")
    return found


# -- the measurements


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
    model, tokenizer, prompts, _ = load(given)
    inputs = prompts[place % len(prompts)]
    contender = CacheStrategy(strategy, model, tokenizer, given, inputs["input_ids"].shape[1])
    with inductor_config.patch(force_disable_caches=True):  # code compiled by an earlier process would not be cold
        return attempt(partial(contender.answer, inputs)) or OUT_OF_MEMORY


def warm(results: Results, given: argparse.Namespace) -> None:
    """Run an uncounted round to warm up, in which every strategy answers every prompt, and then the repeats.

    The strategies take turns at each prompt, each time starting with another one.
    """
    model, tokenizer, prompts, in_words = load(given)
    results.content["weight_bytes"] = answering.weight_bytes(model)
    results.content["prompts"] = in_words
    longest = max(inputs["input_ids"].shape[1] for inputs in prompts)
    strategies = {name: CacheStrategy(name, model, tokenizer, given, longest) for name in given.strategies}
    names, turn = list(strategies), 0
    # Every compiled strategy keeps its own graphs of the same code, and may need one more for another prompt.
    with torch._dynamo.config.patch(recompile_limit=4 * len(strategies) * len(prompts)):
        for repeat in range(given.repeats + 1):
            hears = bool(given.save_audio) and repeat == given.repeats and model.has_talker
            if repeat and results.has("warm", repeat=repeat):
                if not hears or is_heard(results.content["warm"], repeat):
                    continue
                results.drop("warm", repeat=repeat)  # it was measured without the flag: answered again, to be heard
            say(f"turn {repeat} of {given.repeats}" if repeat else "warming up")
            answers = []
            for place, inputs in enumerate(prompts):
                begin, turn = turn % len(names), turn + 1
                with garbage_left():
                    for name in names[begin:] + names[:begin]:
                        with ExitStack() as stack:
                            hear, saved = None, {}
                            if hears:
                                file = given.save_audio / f"{name}-{place}.wav"
                                hear = stack.enter_context(growing_wav(file))
                                saved = {"wav": os.path.relpath(file, given.out.parent)}
                            row = attempt(partial(strategies[name].answer, inputs, hear)) or OUT_OF_MEMORY
                        answers.append({"strategy": name, "prompt": place, **saved, **row})
            if repeat:
                results.add("warm", {"repeat": repeat, "answers": answers})


def is_heard(rounds: list[dict[str, Any]], repeat: int) -> bool:
    """Whether all answers of a stored round that did not fail have their sound in a file."""
    answers = [row for one in rounds if one["repeat"] == repeat for row in one["answers"]]
    return all("wav" in row or "error" in row for row in answers)


def load(
    given: argparse.Namespace,
) -> tuple[Qwen2_5OmniForConditionalGeneration, PreTrainedTokenizerBase, list[Inputs], list[dict[str, Any]]]:
    """Return the model, its tokenizer, the inputs of each prompt, and each prompt described for JSON."""
    torch.set_num_threads(given.threads)
    model, processor = answering.load(given.model, given.dtype, torch.device(given.device), given.without)
    rate = processor.feature_extractor.sampling_rate
    if given.prompts is None:
        prompts = bundled_prompts(rate, given.without)
    else:
        prompts = read_prompts(given.prompts, rate, given.without)
    inputs = [model_inputs(processor, prompt, model.device) for prompt in prompts]
    return model, processor.tokenizer, inputs, [prompt.in_words(rate) for prompt in prompts]
