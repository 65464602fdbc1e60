"""Checks command lines with their own parsers, without running anything."""

import argparse
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from kvcompress.__main__ import main as kvcompress_main
from kvcompress.bench.contenders import MethodSpec
from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.reproduce.config import load_config
from tests.support.docs import ROOT

FOUR = ["tiny_textvqa", "tiny", "snapkv", "0.2"]
# Programs of other projects, whose arguments are not checked.
OTHERS = ("pip", ".venv/bin/pip", "git", "hf", "tar", "python3", ".", "cd", "export", "curl", "vllm")
WITHOUT_FLAGS = ("tests.methods_page", "tests.family_table", "tests.oracle.authors.kvcache_factory", "build")
READ_WHOLE = ("parse_args", "parse_known_args", "parse_intermixed_args", "parse_known_intermixed_args")


class Parsed(BaseException):
    """A parser's result; not an Exception, so that no command handles it as a failure."""


@contextmanager
def parsers_alone() -> Iterator[None]:
    """Context manager in which argparse's parsers raise Parsed after parsing."""
    depth = 0

    def ending(method):
        def read(self, *arguments, **settings):
            nonlocal depth
            depth += 1
            try:
                found = method(self, *arguments, **settings)
            finally:
                depth -= 1
            if depth == 0:
                raise Parsed(found)
            return found

        return read

    with pytest.MonkeyPatch.context() as patch:
        for name in READ_WHOLE:
            patch.setattr(argparse.ArgumentParser, name, ending(getattr(argparse.ArgumentParser, name)))
        yield


def script_module(script: str) -> list[str]:
    """Return the module and first arguments of the `python -m` at the end of a script; empty if it ends otherwise."""
    text = (ROOT / "scripts" / script).read_text(encoding="utf-8")
    found = re.search(r'^exec "\$\{?PYTHON\S*" -m (.+) "\$@"$', text, re.MULTILINE)
    return shlex.split(found[1]) if found else []


def module_words(words: list[str]) -> list[str] | None:
    """Return the module and arguments that a command runs by `python -m`; None for other programs."""
    program, *arguments = words
    if program.startswith("./scripts/"):
        module = script_module(program.rpartition("/")[2])
        return [*module, *arguments] if module else None
    if program.endswith("python") and arguments[:1] == ["-m"]:
        return arguments[1:]
    if program in ("kvcompress", "pytest"):
        return [program, *arguments]
    assert program in OTHERS, f"{program!r} is neither a program of this project nor one of {', '.join(OTHERS)}"
    return None


def check(text: str, config: pytest.Config) -> None:
    """Check a line of shell, which may join commands by `&&`, with the parsers of the programs that it would start.

    Raises AssertionError, SystemExit, or a command's own error for a wrong word."""
    for part in text.split(" && "):
        words = shlex.split(part)
        while re.match(r"\w+=", words[0]):
            words = words[1:]
        if words[0] == "wandb":
            _check_wandb(words[1:])
        elif (given := module_words(words)) is not None:
            _check_module(*given, config=config)


def _check_module(module: str, *arguments: str, config: pytest.Config) -> None:
    words = list(arguments)
    if module == "kvcompress" and words[:1] == ["eval"]:
        module, words = "lmms_eval_plugins.evaluate", words[1:]
    if module == "lmms_eval_plugins.evaluate":
        if words[:1] == ["list"]:
            assert words[1] in ("tasks", "methods", "models")
        else:
            request = parse(words)
            request.flags.server = None  # nothing is there
            Plan.of(request)
    elif module == "pytest":
        flags, unknown = config._parser.parse_known_and_unknown_args(words)
        assert not unknown, unknown
        assert all((ROOT / path).exists() for path in flags.file_or_dir)
    elif module in WITHOUT_FLAGS or (module == "lmms_eval_plugins.text" and find_spec("lm_eval") is None):
        assert find_spec(module)
        assert module == "lmms_eval_plugins.text" or not any(word.startswith("--") for word in words)
    elif module == "lmms_eval_plugins.reproduce":
        flags, rest = _parsed(module, words)  # unknown arguments go to the evaluation
        load_config(flags.name, None)
        Plan.of(parse([*FOUR, *rest]))
    else:
        flags = _parsed(module, words)
        if module == "kvcompress" and words[0] == "bench":
            for name in flags.methods:
                MethodSpec.parse(name, 0.5)


def _parsed(module: str, words: list[str]) -> Any:
    """Return the result of the module's parser."""
    assert find_spec(module), f"there is no module {module}"
    with parsers_alone(), warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *words])
        try:
            if module == "kvcompress":
                kvcompress_main(words)
            else:
                warnings.simplefilter("ignore", RuntimeWarning)  # the module is already imported
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        except Parsed as parsed:
            return parsed.args[0]
    raise AssertionError(f"{module} ended before its words were read, or has no parser: WITHOUT_FLAGS names such ones")


def _check_wandb(words: list[str]) -> None:
    from wandb.cli.cli import cli

    command, names = cli, []
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"wandb has no command {name!r}"
        command, names = command.commands[name], [*names, name]
    command.make_context(" ".join(names), words)
