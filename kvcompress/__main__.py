"""`python -m kvcompress COMMAND ...`.

Other packages add commands of their own by entry points of the group `kvcompress.commands`.
"""

import re
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from .errors import KVCompressError, unknown_name

GROUP = "kvcompress.commands"
OWN = {"bench": "kvcompress.bench.cli", "speech": "kvcompress.bench.speech"}  # a module with `main(arguments)`


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


def main(arguments: list[str]) -> int:
    """Run a command; its exit code, or 2 for what the user can correct, 1 where something else is wrong, 130 after
    Ctrl-C. Every error ends with one line on stderr."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        names = sorted({*OWN, *entry_points(group=GROUP).names})
        print(f"usage: python -m kvcompress {{{','.join(names)}}} ...\n\nCOMMAND --help says more.")
        return 0
    try:
        return find_command(name)(rest) or 0
    except KVCompressError as error:
        return fail(str(error), 2)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except Exception as error:
        traceback.print_exc()
        return fail(f"{type(error).__name__}: {error}", 1)


def fail(message: str, code: int) -> int:
    """Print the error's line, control characters spelt out and endless words cut; returns the exit code."""
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in message)
    line = re.sub(r"\S{500,}", lambda word: word[0][:80] + "...", line)
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
