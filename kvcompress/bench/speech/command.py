"""The command line of the speech bench."""

import argparse
import shlex
from dataclasses import astuple
from pathlib import Path

import torch
from pydantic import NonNegativeInt, PositiveInt

from ... import speech
from ...__main__ import find_command
from ...errors import KVCompressError, unknown_name
from ...files import check_output, write_text
from ...policy.options import Fraction
from ...policy.policy import make_policy
from ...speech_stream import Window
from ..flags import Parser, Threads, device_name, flag, label, new_file
from ..grid import Results
from ..timing import environment
from .prompts import read_lines
from .report import markdown
from .strategies import AFTER_THE_TEXT, STRATEGIES, method_of, talker_method
from .turns import cold, warm


def parser() -> argparse.ArgumentParser:
    this = Parser(
        prog="python -m kvcompress speech",
        description="Time to first audio and real-time factor of Qwen2.5-Omni, cold and warm, with several KV caches.",
    )
    this.add_argument("model", type=label, help="hub id or local path")
    this.add_argument("method", type=label, metavar="METHOD[:OPTION=VALUE...]")
    this.add_argument("ratio", type=flag(Fraction))
    this.add_argument(
        "--strategies", nargs="+", type=label, default=list(AFTER_THE_TEXT), help=f"of {', '.join(STRATEGIES)}"
    )
    this.add_argument("--no-compile", dest="compile", action="store_false", help="static caches without compiling")
    this.add_argument("--compress-talker", action="store_true", help="the method compresses the talker's cache, too")
    this.add_argument(
        "--decode-budget", type=flag(PositiveInt), help="entries that the method keeps in the thinker while it writes"
    )
    this.add_argument(
        "--talker-decode-budget",
        type=flag(PositiveInt),
        help="entries that the method keeps in the talker while it speaks; with it goes --compress-talker",
    )
    this.add_argument(
        "--without", nargs="+", type=label, default=[], metavar="PART", help=f"of {', '.join(speech.PARTS)}"
    )
    this.add_argument(
        "--prompts", type=new_file, metavar="JSONL", help='{"text":, "image": FILE, "audio": WAV FILE} a line'
    )
    this.add_argument("--text-tokens", type=flag(PositiveInt), default=128, help="the longest text")
    this.add_argument(
        "--codec-tokens", type=flag(PositiveInt), default=1024, help="the longest speech, 50 tokens a second"
    )
    this.add_argument(
        "--window",
        nargs=3,
        type=flag(NonNegativeInt),
        default=list(astuple(Window())),
        metavar=("CHUNK", "BEHIND", "AHEAD"),
        help="blocks of codec tokens that become sound at once, and that token2wav sees around them "
        f"(default: {' '.join(map(str, astuple(Window())))})",
    )
    this.add_argument("--one-piece", action="store_true", help="the waveform at the end, as transformers makes it")
    this.add_argument("--exact", action="store_true", help="every answer has exactly these lengths")
    this.add_argument("--repeats", type=flag(PositiveInt), default=3, help="warm answers to each prompt, per strategy")
    this.add_argument(
        "--cold", type=flag(NonNegativeInt), default=3, help="cold starts per strategy, each a process; 0: none"
    )
    this.add_argument("--speaker", type=label, help="default: the checkpoint's first")
    this.add_argument("--seed", type=flag(NonNegativeInt), default=0)
    this.add_argument("--device", type=device_name, default="cuda" if torch.cuda.is_available() else "cpu")
    this.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    this.add_argument("--threads", type=flag(Threads), default=torch.get_num_threads())
    this.add_argument("--save-audio", type=new_file, metavar="FOLDER", help="the last warm answers, as they are spoken")
    this.add_argument(
        "--html",
        action="store_true",
        help="also a page that plays the last warm answers side by side; without --save-audio they go to OUT-audio",
    )
    this.add_argument("--out", type=new_file, default=Path("speech"), help="without a suffix: .json, .md, .html")
    this.add_argument("--resume", action="store_true", help="keep what is in the .json")
    return this


def main(arguments: list[str]) -> int:
    """The exit code. Raises KVCompressError for what is wrong, before anything is loaded where that can be told."""
    given = parser().parse_args(arguments)
    check(given)
    report = find_command("report") if given.html else None
    if given.html and given.save_audio is None and "speech" not in given.without:
        given.save_audio = given.out.with_name(f"{given.out.name}-audio")
    suffixes = (".json", ".md", ".html") if given.html else (".json", ".md")
    check_output(given.out.parent, *(given.out.with_suffix(suffix).name for suffix in suffixes))
    if given.save_audio:
        check_output(given.save_audio)
    elsewhere = ("out", "resume", "save_audio", "html", "repeats", "cold")  # they may change where a run goes on
    settings = {
        **{name: value for name, value in vars(given).items() if name not in elsewhere},
        "prompts": given.prompts and str(given.prompts),
        "labels": labels(given),
        "talker": None if (method := talker_method(given)) is None else str(method),
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
    write_text(given.out.with_suffix(".md"), text)
    print(text)
    return report([str(results.file)]) if report else 0


def check(given: argparse.Namespace) -> None:
    """Raises KVCompressError for everything that can be told before the model is loaded."""
    for strategy in given.strategies:
        if strategy not in STRATEGIES:
            raise unknown_name("there is no strategy", strategy, STRATEGIES)
    for part in given.without:
        if part not in speech.PARTS:
            raise unknown_name("there is no part", part, speech.PARTS)
    if given.prompts is not None:
        read_lines(given.prompts)
    Window(*given.window)
    speaks = "speech" not in given.without
    if speaks and given.text_tokens < speech.FEWEST_TEXT_TOKENS:
        raise KVCompressError(f"--text-tokens {given.text_tokens}: at least {speech.FEWEST_TEXT_TOKENS} can be spoken")
    for strategy in ["compressed", *given.strategies]:
        kind = STRATEGIES[strategy]
        if kind.overlaps and not speaks:
            raise KVCompressError(f"strategy {strategy!r} overlaps text and speech, which --without speech leaves out")
        if not kind.compresses:
            continue
        method = method_of(kind, given)
        policy = make_policy(method.name, method.ratio, **method.options)
        if speaks:
            speech.check_policy(policy)
    method = talker_method(given) if speaks else None
    if method is not None:
        policy = make_policy(method.name, method.ratio, **method.options)
        if policy.cluster.second_pass:
            raise KVCompressError(f"--compress-talker: method {method.name!r} reads the prompt again, a talker cannot")
        if method.is_static:
            raise KVCompressError("--compress-talker: transformers' talker takes no static cache")


def labels(given: argparse.Namespace) -> dict[str, str]:
    """strategy -> what the table calls it."""
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
