"""Parse the command line of an evaluation and check all that needs no model.

Imports nothing heavy, so that a typo is reported at once.
"""

import argparse
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompress.command_line import Parser, called
from kvcompress.flag_types import NUMBER, address, count_or_fraction, folder, fraction, label, path, seeds, shown, whole

from .errors import UsageError
from .evaluator_flags import add_evaluator_flags, check_known, size_of_batch

USAGE = "TASK MODEL METHOD RATIO [flags] [key=value ...]"
# Flag -> the model argument that it sets.
AS_ARGUMENTS = {
    "batch_size": "batch_size",
    "max_batch_size": "max_batch_size",
    "device": "device",
    "system_instruction": "system_prompt",
    "apply_chat_template": "chat_template",
}

# In the demo only 13 to 18 text tokens follow the image, so SnapKV's usual window of 32 would reach into the image;
# 8 does not. Batches of 4 take half the time of single questions and give the same answers.
DEMO = ["tiny_textvqa", "tiny", "full,streamingllm,snapkv,random", "0.5,0.2,0.1,0.05"]
DEMO_LIMIT = 250
DEMO_OVERLAYS = 12  # enough to look at in a report
# KVCache-Factory's benchmarks use kernel 7 and max pooling with that window.
DEMO_ARGUMENTS = {"window_size": 8, "kernel_size": 7, "pooling": "max", "batch_size": 4}

DEFAULT_SEEDS = [0, 1234, 1234, 1234]  # lmms-eval's: python, numpy, torch, few-shot examples
LEVELS = ("TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL")  # loguru's
BUNDLED_MODEL = "tiny"
HUB_ID = re.compile(r"(\w([\w.-]*\w)?/)?\w([\w.-]{,94}\w)?", re.ASCII)


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
    """Return the parser of the flags. Each flag is checked by its `type=`, often from flag_types.py, or `choices=`."""
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
    add("--batch_size", "-b", type=size_of_batch, metavar="N", help="prompts per generate call (1); auto, auto:N")
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
    add_evaluator_flags(parser)
    return parser


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = flag_parser()
    flags, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        check_known(unknown[0], list(parser._option_string_actions))
    bare, name = "--apply_chat_template", flags.apply_chat_template
    is_short = 0 < sum("=" not in word for word in flags.words) < 4
    if isinstance(name, str) and bare in argv and (is_short or "=" in name):
        # The flag swallowed one of the four words, or a key=value, as its NAME.
        place = argv.index(bare)
        flags = _parsed([*argv[:place], *argv[place + 1 :]])
        flags.apply_chat_template = True
    return flags


def parse(argv: list[str]) -> Request:
    """Parse the command line into a `Request`; without TASK, that of the demo. Raises UsageError."""
    flags = _parsed(argv)
    words, arguments = flags.words, {}
    if not words or "=" in words[0]:
        words, arguments = [*DEMO, *words], dict(DEMO_ARGUMENTS)
        flags.limit = DEMO_LIMIT if flags.limit is None else flags.limit
        flags.overlays = DEMO_OVERLAYS if flags.overlays is None else flags.overlays
    if len(words) < 4:
        raise UsageError(f"{('MODEL', 'METHOD', 'RATIO')[len(words) - 1]} is missing; usage: {USAGE}")
    tasks, model, methods, ratio = words[:4]
    given = _arguments(words[4:])
    if "slots" in given:
        arguments.pop("batch_size", None)  # the demo's
    arguments |= given
    for argument, position in (("pretrained", "MODEL"), ("method", "METHOD"), ("ratio", "RATIO")):
        if argument in arguments:
            raise UsageError(f"{argument}= is set by {position}; usage: {USAGE}")
    for flag, argument in AS_ARGUMENTS.items():
        if (value := getattr(flags, flag)) is not None and value is not True:
            if argument in given:
                raise UsageError(f"{argument}= is given twice: --{flag} also sets it")
            arguments[argument] = value
    if flags.wandb_log_samples and not flags.wandb_args:
        raise UsageError("--wandb_log_samples needs --wandb_args")
    flags.overlays = flags.overlays or 0
    check_model(model)

    has_ratio, has_budget = ratio != "-", "budget" in arguments
    if (has_ratio and has_budget) or not (has_ratio or has_budget or "preset" in arguments):
        raise UsageError("give either RATIO, or '-' for RATIO and budget=ENTRIES, or a preset= that sets one")
    budgets = [_budget(item) for item in _items("budget", arguments.pop("budget"))] if has_budget else []
    ratios = [_ratio(item) for item in _items("RATIO", ratio)] if has_ratio else []
    metric, answer_filter = (str(arguments.pop(name)) if name in arguments else None for name in ("metric", "filter"))
    tasks, methods = _items("TASK", tasks), _items("METHOD", methods)
    return Request(tasks, model, methods, ratios, budgets, metric, answer_filter, arguments, flags)


def _items(name: str, text: object) -> list[str]:
    """Return the unique items of a comma-separated list. Raises UsageError if it is empty."""
    items = list(dict.fromkeys(item.strip() for item in str(text).split(",") if item.strip()))
    if not items:
        raise UsageError(f"{name} {str(text)!r} is an empty list; usage: {USAGE}")
    return items


def _ratio(text: str) -> float:
    try:
        return fraction(text)
    except argparse.ArgumentTypeError:
        meaning = "it is the fraction of the prompt's KV entries to keep"
        if NUMBER.fullmatch(text):
            raise UsageError(f"RATIO {text:.80} is not in (0, 1]: {meaning}") from None
        raise UsageError(f"RATIO {shown(text)} is not a number: {meaning}") from None


def _budget(text: str) -> int:
    try:
        return whole(1)(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"budget={error}") from None


def check_model(model: str) -> None:
    """Raise UsageError for a MODEL that cannot name a model. Whether a hub id exists is not checked."""
    local = os.path.expanduser(model)
    if model == BUNDLED_MODEL:
        return
    if os.path.isdir(local):
        config = os.path.join(local, "config.json")
        if not os.path.isfile(config):
            raise UsageError(f"MODEL {shown(model)} is a folder without config.json, so it holds no model")
        try:
            is_config = isinstance(json.loads(Path(config).read_text(encoding="utf-8")), dict)
        except (OSError, ValueError, RecursionError):  # ValueError: neither UTF-8 nor JSON
            is_config = False
        if not is_config:
            raise UsageError(f"MODEL {shown(model)}: its config.json is damaged: it holds no JSON object")
    elif os.path.isfile(local):
        raise UsageError(f"MODEL {shown(model)} is a file: give the folder of a checkpoint in transformers' format")
    elif not HUB_ID.fullmatch(model) or "--" in model or ".." in model or model.endswith(".git"):
        raise UsageError(
            f"MODEL {shown(model)} is neither a folder, nor a hub id such as org/name, nor {BUNDLED_MODEL!r}"
        )


def _arguments(words: list[str]) -> dict[str, Any]:
    arguments = {}
    for word in words:
        argument, equals, value = word.partition("=")
        if not equals or not argument:
            raise UsageError(f"{shown(word)} is neither a flag nor key=value; usage: {USAGE}")
        if argument in arguments:
            raise UsageError(f"{argument}= is given twice")
        arguments[argument] = literal(value)
    return arguments


def _gen_kwargs(text: str) -> dict[str, Any]:
    try:
        return _arguments([word for word in text.split(",") if word])
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
