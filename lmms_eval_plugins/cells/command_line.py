"""The command line of `scripts/run_eval.sh`: what is asked for, checked as far as no model is needed.

Imports nothing heavy, so that a slip of the fingers is answered at once.
"""

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError, nearest

USAGE = "TASK MODEL METHOD RATIO [flags] [key=value ...]"

# In the demo only 13 to 18 tokens of text follow the image, so SnapKV's usual window of 32 would look on from inside
# the image: 8. Batches of 4 take half the time of single questions; the answers are the same.
DEMO = ["tiny_textvqa", "tiny", "full,streamingllm,snapkv,random", "0.5,0.2,0.1,0.05"]
DEMO_LIMIT = 250
DEMO_OVERLAYS = 12  # enough to look at in a report
# Kernel 7 and max pooling go with that window in KVCache-Factory's benchmarks.
DEMO_ARGUMENTS = {"window_size": 8, "kernel_size": 7, "pooling": "max", "batch_size": 4}

DEFAULT_SEEDS = [0, 1234, 1234, 1234]  # lmms-eval's: python, numpy, torch, few-shot examples


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        ratios: fractions to keep; empty where `budgets` are given.
        budgets: entries to keep per layer and head.
        metric, filter: the task's metric and answer filter that stand in the table; None for the main ones.
        arguments: the `key=value` arguments, the model's and the methods'.
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


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its usage and exit."""

    def error(self, message: str) -> None:
        raise UsageError(message)


def flag_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="run_eval.sh",
        usage=f"%(prog)s {USAGE}\n       %(prog)s [flags]        the demo: bundled model and task",
        description="Evaluate a model under KV-cache compression with lmms-eval. METHOD and RATIO may be comma lists.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="TASK MODEL METHOD RATIO key=value", help="MODEL `tiny` is the bundled one")
    add("--limit", type=float, help="questions per task: a number, or a fraction below 1")
    add("--batch_size", type=int, help="prompts per generate call (1)")
    add("--output_path", type=Path, default=Path("results"), metavar="DIR", help="root of the results (results)")
    add("--data-root", type=Path, metavar="DIR", help="holds dataset folders named as on the hub (data, if there)")
    add("--force", action="store_true", help="compute complete cells again")
    add("--overlays", type=int, metavar="N", help="note which tokens survive, of each task's first N (0)")
    add("--gen_kwargs", type=_gen_kwargs, default={}, metavar="a=1,b=2", help="arguments of generate")
    add("--num_fewshot", type=int, metavar="N", help="examples in the prompt")
    add("--seed", type=_seeds, default=DEFAULT_SEEDS, help="one, or four: python,numpy,torch,fewshot")
    add("--include_path", type=Path, metavar="DIR", help="folder with more task YAMLs")
    add("--predict_only", action="store_true", help="write the answers, compute no score")
    add("--device", help="cuda, cuda:0, cpu (default: a GPU if there is one)")
    add("--log_samples", action="store_true", help="always on")
    add("--verbosity", default="WARNING", type=str.upper, help="log level of lmms-eval (WARNING)")
    return parser


def parse(argv: list[str]) -> Request:
    """The command line as a `Request`; without TASK the demo's. Raises UsageError."""
    parser = flag_parser()
    flags, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        raise UsageError(f"unknown flag {unknown[0]!r}{nearest(unknown[0], parser._option_string_actions)}")
    words, arguments = flags.words, {}
    if not words or "=" in words[0]:
        words, arguments = [*DEMO, *words], dict(DEMO_ARGUMENTS)
        flags.limit = DEMO_LIMIT if flags.limit is None else flags.limit
        flags.overlays = DEMO_OVERLAYS if flags.overlays is None else flags.overlays
    if len(words) < 4:
        raise UsageError(f"{('MODEL', 'METHOD', 'RATIO')[len(words) - 1]} is missing; usage: {USAGE}")
    tasks, model, methods, ratio = words[:4]
    arguments |= _arguments(words[4:])
    for name, position in (("pretrained", "MODEL"), ("method", "METHOD"), ("ratio", "RATIO")):
        if name in arguments:
            raise UsageError(f"{name}= is what {position} says; usage: {USAGE}")
    for name in ("batch_size", "device"):
        if getattr(flags, name) is not None:
            arguments[name] = getattr(flags, name)
    flags.limit = _limit(flags.limit)
    flags.overlays = flags.overlays or 0
    if flags.overlays < 0:
        raise UsageError(f"--overlays {flags.overlays} is not a number of questions")
    for name in ("data_root", "include_path"):
        folder = getattr(flags, name)
        if folder is not None and not folder.is_dir():
            raise UsageError(f"--{name.replace('_root', '-root')} {str(folder)!r} is not a folder")
        setattr(flags, name, folder and folder.resolve())  # the working directory changes before it is used

    has_budget = "budget" in arguments
    if has_budget == (ratio != "-"):
        raise UsageError("give either RATIO, or '-' for RATIO and budget=ENTRIES")
    budgets = [_budget(item) for item in _items("budget", arguments.pop("budget"))] if has_budget else []
    ratios = [] if has_budget else [_ratio(item) for item in _items("RATIO", ratio)]
    metric, answer_filter = (str(arguments.pop(name)) if name in arguments else None for name in ("metric", "filter"))
    tasks, methods = _items("TASK", tasks), _items("METHOD", methods)
    return Request(tasks, model, methods, ratios, budgets, metric, answer_filter, arguments, flags)


def _items(name: str, text: object) -> list[str]:
    """The items of a comma list, each once. Raises UsageError where there is none."""
    items = list(dict.fromkeys(item.strip() for item in str(text).split(",") if item.strip()))
    if not items:
        raise UsageError(f"{name} {str(text)!r} is a list without items; usage: {USAGE}")
    return items


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        raise UsageError(f"RATIO {text!r} is not a number; usage: {USAGE}") from None
    if not 0 < ratio <= 1:
        raise UsageError(f"RATIO {text} is not in (0, 1]: it is the fraction of the prompt's KV entries that is kept")
    return ratio


def _budget(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise UsageError(f"budget={text} is not a positive number of entries")
    return int(text)


def _limit(limit: float | None) -> float | int | None:
    """Whole numbers become int, which is how lmms-eval tells a count from a fraction."""
    if limit is None or 0 < limit < 1:
        return limit
    if limit < 1 or limit != int(limit):
        raise UsageError(f"--limit {limit:g} is neither a number of questions nor a fraction below 1")
    return int(limit)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(item) for item in text.split(",")]
    except ValueError:
        seeds = []
    if len(seeds) not in (1, 4):
        raise argparse.ArgumentTypeError(f"{text!r} is neither one seed nor four")
    return seeds if len(seeds) == 4 else seeds * 4


def _arguments(words: list[str]) -> dict[str, Any]:
    arguments = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"{word!r} is neither a flag nor key=value; usage: {USAGE}")
        if name in arguments:
            raise UsageError(f"{name}= is given twice")
        arguments[name] = literal(value)
    return arguments


def _gen_kwargs(text: str) -> dict[str, Any]:
    try:
        return _arguments([word for word in text.split(",") if word])
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def literal(text: str) -> bool | int | float | str:
    """`8` -> 8, `0.5` -> 0.5, `true` -> True; anything else stays text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text
