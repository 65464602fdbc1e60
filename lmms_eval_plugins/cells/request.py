"""What the command line of an evaluation asks for, and its flags: our own, those of lmms-eval's own command that work
here as there, and for each of the others what to use instead.

Imports nothing heavy.
"""

import argparse
import contextlib
import json
import zoneinfo
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompress.command_line import Parser, called
from kvcompress.errors import nearest, shown
from kvcompress.flag_types import NUMBER, address, count_or_fraction, folder, label, path, prose, seeds, whole

from .errors import UsageError

USAGE = "TASK MODEL METHOD RATIO [flags] [key=value ...]"
BUNDLED_MODEL = "tiny"
DEFAULT_SEEDS = [0, 1234, 1234, 1234]  # lmms-eval's: python, numpy, torch, few-shot examples
LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")  # loguru's
MOST_TOKENS = 2**20  # in a prompt that a task writes itself
# Text between these tags is removed from an answer before scoring; lmms-eval's own default.
REASONING_TAGS = '[["<think>", "</think>"], ["<analysis>", "</analysis>"]]'

METRICS = f"{called('metrics')} --compare tests differences between cells"
POWER = "`lmms-eval power` plans the number of questions"
WANDB = "--wandb_args logs a run per cell"
REPLACED = {
    "--config": f"{called('sweep')} FILE runs what a file describes",
    "--model": "the second word, MODEL, names the checkpoint; the wrapper is always kvcompress",
    "--tasks": f"the first word, TASK, names tasks; `{called('list')} tasks [WORD]` lists them",
    "--model_args": "give key=value words",
    "--launcher_args": "start the judge's server yourself, and name it by the variables that the task reads",
    "--cache_requests": "prompts need no cache: they are prepared while the model answers, once for all cells "
    "(look_ahead=, vision_cache_gb=)",
    "--log_samples_suffix": "each cell has its own folder for samples.jsonl; --output_path keeps runs apart",
    "--swanlab_log_samples": "--wandb_log_samples logs them, with --wandb_args",
    "--swanlab_args": f"{WANDB}; SwanLab reads such runs",
    "--trust_remote_code": "trust_remote_code=true is for the model's code; datasets no longer run any",
    "--agentic_trace_mode": "agentic tasks are not supported: they call tools in rounds of their own",
    "--force_simple": "the model is a chat model; chat_template=plain sends a task's text unchanged",
    "--tui": "there is no such mode; --help lists all flags",
    "--baseline": METRICS,
    "--max_tokens": "--limit bounds the questions, max_new_tokens= an answer",
    "--power-analysis": POWER,
    "--effect-size": POWER,
    "--alpha": POWER,
    "--power": POWER,
    "--correlation": POWER,
    "--std-a": POWER,
    "--std-b": POWER,
}


@dataclass(frozen=True)
class Request:
    """The parsed command line.

    Attributes:
        ratios: fractions to keep; empty if `budgets` are given.
        budgets: entries to keep per layer and head. If both are empty, the `preset` in `arguments` sets the size.
        metric, filter: the task's metric and answer filter to show in the table; None for the main ones.
        arguments: the `key=value` arguments of the model and the methods.
        flags: the flags by name.
    """

    tasks: list[str]
    model: str
    methods: list[str]
    ratios: list[float]
    budgets: list[int]
    metric: str | None
    filter: str | None
    arguments: dict[str, Any]
    flags: argparse.Namespace


def flag_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags. Each flag is checked by its `type=`, often of flag_types.py, or by `choices=`."""
    parser = Parser(
        "eval",
        usage=f"%(prog)s {USAGE}\n       %(prog)s [flags]        the demo: bundled model and task\n"
        f"       {called('list')} tasks|methods|models [WORD]",
        description="Evaluate a model under KV-cache compression with lmms-eval. METHOD and RATIO may be comma lists. "
        "METHOD may be all, all-kv or all-tokens.",
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="TASK MODEL METHOD RATIO key=value", help="MODEL `tiny` is the bundled one")
    add("--limit", type=count_or_fraction, help="questions per task: a number, or a fraction below 1")
    add("--batch_size", "-b", type=_size_of_batch, metavar="N", help="prompts per generate call (1); auto, auto:N")
    add("--output_path", type=path, default=Path("results"), metavar="DIR", help="root of the results (results)")
    add("--data-root", type=folder, metavar="DIR", help="holds dataset folders named as on the hub (data, if there)")
    add("--force", action="store_true", help="compute complete cells again")
    add("--overlays", type=whole(), metavar="N", help="record the kept tokens of each task's first N questions (0)")
    add("--gen_kwargs", type=_gen_kwargs, default={}, metavar="a=1,b=2", help="arguments of generate")
    add("--num_fewshot", type=whole(), metavar="N", help="examples in the prompt")
    add("--seed", type=seeds, default=DEFAULT_SEEDS, help="one, or four: python,numpy,torch,fewshot")
    add("--include_path", type=folder, metavar="DIR", help="folder with more task YAMLs")
    add("--predict_only", "-x", action="store_true", help="write the answers, compute no score")
    add("--server", type=address, metavar="URL", help="a server that answers, such as `kvcompress serve` or vLLM's")
    add("--device", type=label, help="cuda, cuda:0, mps, cpu (default: a CUDA GPU if there is one)")
    add("--log_samples", action="store_true", help="always on")
    add("--verbosity", default="WARNING", type=str.upper, choices=LEVELS, help="log level of lmms-eval (WARNING)")
    # Those of lmms-eval's that work here as they do there.
    add("--max_batch_size", type=whole(1), metavar="N", help="with --batch_size auto, the most prompts per batch (64)")
    add("--offset", type=whole(), default=0, metavar="N", help="leave out each task's first N questions (0)")
    add("-n", "--repeats", "--num_samples", type=whole(1), default=1, metavar="N", help="answers per question (1)")
    add("--system_instruction", type=prose, metavar="TEXT", help="the same as system_prompt=TEXT")
    add(
        "--apply_chat_template",
        nargs="?",
        const=True,
        type=label,
        metavar="NAME",
        help="always on, except for lm-eval's tasks; NAME selects a template of the checkpoint, as chat_template=NAME",
    )
    add("--metadata", type=_metadata, default={}, metavar="JSON", help="for lm-eval's tasks with generated prompts")
    add("--fewshot_as_multiturn", action="store_true", help="examples as turns of a chat, with their images")
    add(
        "--reasoning_tags",
        type=_reasoning_tags,
        default=REASONING_TAGS,
        metavar="JSON",
        help='pairs of tags; text between them is not scored ("none": all text is)',
    )
    add("--process_with_media", action="store_true", help="also pass images to the scorer")
    add(
        "--process-docs-parallel",
        "--process_docs_parallel",
        type=whole(1),
        default=4,
        metavar="N",
        help="scoring threads",
    )
    add("--use_cache", "-c", type=path, metavar="DIR", help="reuse answers of earlier runs from DIR, and add new ones")
    add("--check_integrity", action="store_true", help="read every question, image and video before the model loads")
    add("--write_out", "-w", action="store_true", help="show each task's first prompt and target, with their tokens")
    add("--show_config", action="store_true", help="show the tasks' full configuration at the end")
    add("--timezone", type=_timezone, default="UTC", metavar="NAME", help="time zone of the date in results.json (UTC)")
    add("--wandb_args", type=_key_values, metavar="a=1,b=2", help="log a run per cell; arguments of wandb.init")
    add("--wandb_log_samples", action="store_true", help="with --wandb_args, also log the answers")
    add("--hf_hub_log_args", type=_hub_arguments, metavar="a=1,b=2", help="push results to the hub")
    return parser


def check_known(flag: str, valid: list[str]) -> None:
    """Raise UsageError for an unknown flag, with a hint at what to use instead."""
    name = flag.partition("=")[0]
    if name in REPLACED:
        raise UsageError(f"{name} is not supported here: {REPLACED[name]}")
    raise UsageError(f"unknown flag {name!r}{nearest(name, valid)}")


def _size_of_batch(text: str) -> int | str:
    """Parse `8`, `auto` or `auto:4`."""
    times = text.removeprefix("auto:")
    if text == "auto" or (times != text and times.isascii() and times.isdigit() and 0 < int(times) < 10**6):
        return text
    try:
        return whole(1)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a whole number of at least 1, nor auto, nor auto:N"
        ) from None


def arguments_of(words: list[str]) -> dict[str, Any]:
    """Parse `key=value` words. Raises UsageError."""
    arguments = {}
    for word in words:
        argument, equals, value = word.partition("=")
        if not equals or not argument:
            raise UsageError(f"{shown(word)} is neither a flag nor key=value; usage: {USAGE}")
        if argument in arguments:
            raise UsageError(f"{argument}= is given twice")
        arguments[argument] = literal(value)
    return arguments


def literal(text: str) -> bool | int | float | str:
    """Convert `8` to 8, `0.5` to 0.5 and `true` to True; anything else stays text.

    A number in another spelling, such as `0012` or `1.10`, also stays text, because it may name a branch; an argument
    whose type is a number converts it later.
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if len(text) < 30 and NUMBER.fullmatch(text):
        value = int(text) if text.lstrip("+-").isdigit() else float(text)
        if str(value) == text:
            return value
    return text


def _gen_kwargs(text: str) -> dict[str, Any]:
    try:
        return arguments_of([word for word in text.split(",") if word])
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _reasoning_tags(text: str) -> str:
    try:
        pairs = [] if text == "none" else json.loads(text)
        if all(len(pair) == 2 and all(isinstance(tag, str) and tag for tag in pair) for pair in pairs):
            return text
    except (ValueError, TypeError, RecursionError):
        pass
    raise argparse.ArgumentTypeError(f"{shown(text)} is neither none nor a JSON list of pairs of tags")


def _metadata(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{shown(text)} is not a JSON object such as {{"max_seq_lengths": [2048]}}')
    lengths = found.get("max_seq_lengths", [2048])
    are_lengths = isinstance(lengths, list) and all(type(length) is int for length in lengths)
    if not are_lengths or not lengths or not all(0 < length <= MOST_TOKENS for length in lengths):
        raise argparse.ArgumentTypeError(
            f"max_seq_lengths {shown(lengths)} is not a list of prompt lengths, whole numbers from 1 to {MOST_TOKENS}"
        )
    return found


def _timezone(text: str) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):  # ZoneInfoNotFoundError is a KeyError
        zoneinfo.ZoneInfo(text)
        return text
    raise argparse.ArgumentTypeError(
        f"{shown(text)} is not a time zone{nearest(text, zoneinfo.available_timezones())}, such as Europe/Berlin or UTC"
    )


def _key_values(text: str) -> dict[str, str]:
    """Parse `a=1,b=c` into {"a": "1", "b": "c"}."""
    found: dict[str, str] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = item.partition("=")
        if not equals or not name or name in found:
            raise argparse.ArgumentTypeError(f"{shown(item)} is not name=value, or is given twice")
        found[name] = value
    if not found:
        raise argparse.ArgumentTypeError(f"{shown(text)} holds no name=value")
    return found


HUB_SWITCHES = ("push_results_to_hub", "push_samples_to_hub", "public_repo", "gated")
HUB_NAMES = ("hub_results_org", "hub_repo_name", "details_repo_name", "results_repo_name", *HUB_SWITCHES)


def _hub_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of lmms-eval's EvaluationTracker."""
    found: dict[str, Any] = {}
    for name, value in _key_values(text).items():
        if name == "token":
            raise argparse.ArgumentTypeError("token: set HF_TOKEN, which is not written into any file")
        if name not in HUB_NAMES:
            hint = nearest(name, HUB_NAMES)
            raise argparse.ArgumentTypeError(f"{shown(name)} is not one of {', '.join(HUB_NAMES)}{hint}")
        if name in HUB_SWITCHES and value.lower() not in ("true", "false"):
            raise argparse.ArgumentTypeError(f"{name}={shown(value)} is neither true nor false")
        found[name] = value.lower() == "true" if name in HUB_SWITCHES else value
    if not (found.get("push_results_to_hub") or found.get("push_samples_to_hub")):
        raise argparse.ArgumentTypeError("neither push_results_to_hub=true nor push_samples_to_hub=true is given")
    return found
