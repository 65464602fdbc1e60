"""What all commands share: the parser, how users call them, signals and exit codes. Imports nothing heavy."""

import argparse
import atexit
import contextlib
import errno
import functools
import io
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from .errors import KVCompressError, nearest, one_line, shown
from .version import __version__

# Errors caused by the machine, not by the program.
DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
)  # fmt: skip
MEMORY_ERRORS = ("allocate memory", "out of memory", "_ALLOC_FAILED")  # torch's messages for CPU, GPU and GPU libraries
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
TIDY_S = 10  # seconds in which a second request to end is ignored

WITH_ALL = "pip install 'kvcompress[eval]'"
SCRIPTS_FOLDER = "KVCOMPRESS_SCRIPTS"  # environment variable, set by a checkout's scripts: their folder
SCRIPTS = {"eval": "run_eval.sh", "list": "run_eval.sh list", "reproduce": "reproduce.sh", "sweep": "run_sweep.sh"}
SCRIPTS |= {"speech": "run_speech.sh"}

# Environment variable -> allowed values, as a pattern and in words. An empty variable counts as not set.
COUNT, SWITCH = r"[1-9]\d{0,3}", "(?i:1|0|on|off|yes|no|true|false)"
VARIABLES = {
    "OMP_NUM_THREADS": (f"{COUNT}(,{COUNT})*", "a number of threads, from 1 to 9999"),
    "HF_HUB_OFFLINE": (SWITCH, "1 or 0"),
}


def check_environment(variables: dict[str, tuple[str, str]]) -> None:
    """Raise KVCompressError for a variable of the environment, among `variables`, that would be ignored or misread."""
    for name, (pattern, meaning) in variables.items():
        if (value := os.environ.get(name)) and not re.fullmatch(pattern, value, re.ASCII):
            raise KVCompressError(f"{name}={shown(value)} is not {meaning}")


def called(command: str) -> str:
    """Return a command as the user calls it.

    This is `./scripts/run_eval.sh` if a checkout's script runs, otherwise `kvcompress eval`, or `python -m kvcompress
    eval` if Python was started that way."""
    if command in SCRIPTS and (folder := os.environ.get(SCRIPTS_FOLDER)):
        return f"{folder}/{SCRIPTS[command]}"
    is_console = Path(sys.argv[0]).stem == "kvcompress"
    return f"{'kvcompress' if is_console else 'python -m kvcompress'} {command}"


class Parser(argparse.ArgumentParser):
    """A command's parser; raises KVCompressError where argparse would print the usage and exit."""

    def __init__(self, command: str = "", **settings: Any):
        """`command` is the name after `kvcompress`; other programs pass a `prog` instead."""
        super().__init__(**{"prog": called(command), "allow_abbrev": False, **settings})
        self.add_argument("--version", action="version", version=f"kvcompress {__version__}")

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        if settings.get("nargs") == "*" and not names[0].startswith("-"):
            settings.setdefault("default", [])  # else argparse lists it among what is required and missing
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        if (unknown := message.removeprefix("unrecognized arguments: ")) != message and not unknown.strip():
            message = "an argument is empty"
        elif (flag := unknown.split()[0]).startswith("-"):
            message = f"unknown flag {shown(flag)}{nearest(flag, self._option_string_actions)}"
        is_of_a_value = message.startswith("argument ")
        raise KVCompressError(message if is_of_a_value else f"{message}; {self.prog} --help says more")


def key_values(given: Iterable[str], words: Iterable[str] = ()) -> dict[str, str]:
    """Parse `["sinks=4"]` into {"sinks": "4"}. Raises KVCompressError, also for what other `words` set."""
    found: dict[str, str] = {}
    for each in given:
        if "=" not in each:
            raise KVCompressError(f"{shown(each)} is not OPTION=VALUE")
        if (name := each.split("=")[0]) in words:
            raise KVCompressError(f"{shown(each)} is not an option: {name.upper()} sets it")
        if name in found:
            raise KVCompressError(f"{name}= is given twice")
        found[name] = each.split("=", 1)[1]
    return found


class Interrupted(KeyboardInterrupt):
    """Raised when a signal asks the process to end; `number` is the signal's."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


def interrupt_on_signals() -> dict[int, Any]:
    """Make SIGTERM and SIGHUP end the process like Ctrl-C, by an exception, so that everything is cleaned up.

    An ignored signal stays ignored, as under nohup. Returns the previous handlers; does nothing outside the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    asked_at = -math.inf

    def interrupt(number: int, frame: object) -> None:
        nonlocal asked_at
        is_tidying = time.monotonic() - asked_at < TIDY_S
        if is_tidying and number != signal.SIGINT:  # a second Ctrl-C counts
            return
        asked_at = time.monotonic()
        raise Interrupted(number)

    for number in before:
        signal.signal(number, interrupt)
    return before


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context manager for `interrupt_on_signals`."""
    before = interrupt_on_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(command: Callable[[list[str]], int | None], argv: list[str] | None = None, kept: str = "") -> int:
    """Run a command and return its exit code.

    The code is 0 if the command returns none, 2 for bad input, 1 for any other error, and 128 plus the signal's number
    after SIGINT (Ctrl-C), SIGTERM or SIGHUP. Every error ends with one line on stderr. An exception may set its code
    with an attribute `exit_code`.

    Args:
        argv: the arguments, by default the process's.
        kept: what survives an interruption, if anything, such as "cells".
    """
    _prepare_output()
    try:
        with interruptible():
            code = command(sys.argv[1:] if argv is None else argv) or 0
            sys.stdout.flush()  # here, so that a full disk or a closed pipe is reported
            return code
    except KeyboardInterrupt as error:
        number = getattr(error, "number", signal.SIGINT)
        if "LOCAL_RANK" in os.environ:  # one of several processes: their launcher reports it
            return 128 + number
        how = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        return fail(
            f"{how}; finished {kept} are kept, the same command continues from there" if kept else how, 128 + number
        )
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does after ten lines
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output at Python's exit
        return 141  # the code of a process ended by SIGPIPE
    except Exception as error:
        if (code := getattr(error, "exit_code", None)) is not None:
            return fail(error, code)
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(
            ("kvcompress", "lmms_eval_plugins")
        ):
            return fail(f"{error.name} is not installed; everything that commands need comes with: {WITH_ALL}", 1)
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            return fail(f"{error.filename or 'a file'} cannot be written or read: {error.strerror}", 1)
        if isinstance(error, MemoryError) or any(words in str(error) for words in MEMORY_ERRORS):
            return fail(f"not enough memory: {one_line(error, 300)}", 1)
        traceback.print_exc()
        return fail(f"{type(error).__name__}: {error}", 1)


def _prepare_output() -> None:
    """Let no print fail: discard output where a stream is closed, and escape characters that its encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def returns_exit_code(kept: str = "") -> Callable[[Callable[[list[str]], int | None]], Callable[..., int]]:
    """Return a decorator that makes a function of the arguments a command: it returns the exit code, and every error is
    one line on stderr, see `exit_code`."""

    def decorated(command: Callable[[list[str]], int | None]) -> Callable[..., int]:
        @functools.wraps(command)
        def main(argv: list[str] | None = None) -> int:
            return exit_code(command, argv, kept)

        return main

    return decorated


def leave(code: int) -> NoReturn:
    """End the process with this exit code after running exit handlers.

    Python's own exit would then free a million imported objects one by one, which takes two seconds."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader is gone
            stream.flush()
    os._exit(code)


def fail(error: object, code: int) -> int:
    """Print the error in one line, with control characters escaped and endless words cut; return the exit code."""
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(error))
    line = re.sub(r"\S{500,}", lambda word: word[0][:80] + "...", line)
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code
