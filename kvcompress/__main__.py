"""`python -m kvcompress COMMAND ...`.

Other packages add commands of their own by entry points of the group `kvcompress.commands`.
"""

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from .errors import KVCompressError, shown, unknown_name

GROUP = "kvcompress.commands"
OWN = {  # a module with `main(arguments)`
    "bench": "kvcompress.bench.cli",
    "calibrate": "kvcompress.calibration.command",
    "speech": "kvcompress.bench.speech",
}


# Environment variable -> what it may be, as a pattern and in words. An empty one counts as not set.
VARIABLES = {
    "OMP_NUM_THREADS": (r"[1-9]\d{0,3}(,[1-9]\d{0,3})*", "a number of threads, from 1 to 9999"),
    "HF_HUB_OFFLINE": ("(?i:1|0|on|off|yes|no|true|false)", "1 or 0"),
}


def check_environment() -> None:
    """Raises KVCompressError for a variable that libraries would ignore, or take for something else."""
    for name, (pattern, meaning) in VARIABLES.items():
        if (value := os.environ.get(name)) and not re.fullmatch(pattern, value, re.ASCII):
            raise KVCompressError(f"{name}={shown(value)} is not {meaning}")


def find_command(name: str) -> Callable[[list[str]], int | None]:
    """The function that runs a command, given its arguments; what it returns, if anything, is the exit code.

    Raises KVCompressError for an unknown one.
    """
    if name in OWN:
        return import_module(OWN[name]).main
    registered = entry_points(group=GROUP)
    if name in registered.names:
        return registered[name].load()
    error = unknown_name("there is no command", name, {*OWN, *registered.names})
    raise KVCompressError(f"{error}; a package's commands are known once it is installed anew: pip install -e .")


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP came; all is tidied up on the way out."""


def interrupt(number: int, frame: object) -> None:
    raise Interrupted(number)


def main(arguments: list[str]) -> int:
    """Run a command; its exit code, or 2 for what the user can correct, 1 where something else is wrong; after a signal
    128 and its number. Every error ends with one line on stderr."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        names = sorted({*OWN, *entry_points(group=GROUP).names})
        print(f"usage: python -m kvcompress {{{','.join(names)}}} ...\n\nCOMMAND --help says more.")
        return 0
    signals = [getattr(signal, each) for each in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, each)]
    signals = [each for each in signals if signal.getsignal(each) not in (signal.SIG_IGN, None)]  # as under nohup
    before = {each: signal.signal(each, interrupt) for each in signals}
    try:
        check_environment()
        return find_command(name)(rest) or 0
    except KVCompressError as error:
        return fail(str(error), 2)
    except Interrupted as error:
        number = error.args[0]
        return fail(f"ended by {signal.Signals(number).name}", 128 + number)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
            return fail(f"memory does not suffice: {' '.join(str(error).split())[:300]}", 1)
        traceback.print_exc()
        return fail(f"{type(error).__name__}: {error}", 1)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def fail(message: str, code: int) -> int:
    """Print the error's line, control characters spelt out and endless words cut; returns the exit code."""
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in message)
    line = re.sub(r"\S{500,}", lambda word: word[0][:80] + "...", line)
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
