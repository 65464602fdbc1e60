"""Run the speech benchmark and write its results."""

import argparse

import torch

from ..__main__ import find_command
from ..bench.results import Results, about
from ..device import default_device
from ..errors import KVCompressError, unknown_name
from ..files import check_output
from ..policy.conflicts import SPEECH, check_conflicts
from ..policy.make import make_policy
from .answering import FEWEST_TEXT_TOKENS, PARTS
from .kinds import STRATEGIES
from .prompts import read_lines
from .report import markdown
from .strategies import method_of, talker_method
from .streaming import Window
from .turns import cold, warm


def measure(given: argparse.Namespace, arguments: list[str]) -> int:
    """Run the benchmark given by parsed `arguments` and return the exit code.

    Raises KVCompressError for wrong arguments, if possible before anything is loaded."""
    given.device, given.threads = given.device or str(default_device()), given.threads or torch.get_num_threads()
    check(given)
    report = find_command("report") if given.html else None
    if given.html and given.save_audio is None and "speech" not in given.without:
        given.save_audio = given.out.with_name(f"{given.out.name}-audio")
    suffixes = (".json", ".md", ".html") if given.html else (".json", ".md")
    check_output(given.out.parent, *(given.out.with_suffix(suffix).name for suffix in suffixes))
    if given.save_audio:
        check_output(given.save_audio)
    elsewhere = ("out", "resume", "save_audio", "html", "repeats", "cold")  # these may change when a run is resumed
    settings = {
        **{name: value for name, value in vars(given).items() if name not in elsewhere},
        "prompts": given.prompts and str(given.prompts),
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
    for strategy in given.strategies:
        if strategy not in STRATEGIES:
            raise unknown_name("there is no strategy", strategy, STRATEGIES)
    for part in given.without:
        if part not in PARTS:
            raise unknown_name("there is no part", part, PARTS)
    if given.prompts is not None:
        read_lines(given.prompts)
    Window(*given.window)
    speaks = "speech" not in given.without
    if speaks and given.text_tokens < FEWEST_TEXT_TOKENS:
        raise KVCompressError(f"--text-tokens {given.text_tokens}: at least {FEWEST_TEXT_TOKENS} can be spoken")
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
    names = {"dynamic": "transformers DynamicCache", "static": f"transformers StaticCache{compiled}"}
    found = {}
    for strategy in given.strategies:
        kind = STRATEGIES[strategy]
        if kind.compresses:
            name = str(method_of(kind, given)) + (compiled if kind.is_static else "")
        else:
            name = names["static" if kind.is_static else "dynamic"]
        found[strategy] = name + (", overlapped" if kind.overlaps else "")
    return found
