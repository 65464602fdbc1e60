"""`kvcompress COMMAND ...`, or `python -m kvcompress COMMAND ...`.

Other packages add commands by entry points in the group `kvcompress.commands`. An entry point is a function that takes
the arguments; the first line of its module's docstring describes the command, and the module's `parser()` returns its
parser. An entry point overrides a built-in command of the same name. A command's module imports nothing heavy before
the command runs.
"""

import os
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from types import ModuleType

from .command_line import VARIABLES, check_environment, exit_code, leave
from .errors import unknown_name
from .version import __version__

GROUP = "kvcompress.commands"
OWN = {  # a module with `main(arguments)`
    "bench": "kvcompress.bench.command",
    "calibrate": "kvcompress.calibration.command",
    "check": "kvcompress.check.command",
    "export": "kvcompress.engines.command",
    "list": "kvcompress.list_command",
    "serve": "kvcompress.serve.command",
    "speech": "kvcompress.speech.command",
    "train": "kvcompress.train.command",
}
BEGIN = """To begin:
  kvcompress list methods                           every method, with its paper
  kvcompress eval                                   accuracy against ratio on the bundled model; no GPU, no model hub
  kvcompress eval textvqa_val MODEL snapkv 0.2      a benchmark of lmms-eval under a method and a ratio

`eval` and the commands that read its results come with: pip install 'kvcompress[eval]'"""


@cache
def registered() -> EntryPoints:
    """Return the commands of installed packages; to look through all packages takes 10 ms."""
    return entry_points(group=GROUP)


def commands() -> list[str]:
    """Return the names of all commands."""
    return sorted({*OWN, *registered().names})


def module_of(name: str) -> ModuleType:
    """Return the module of a command. Raises KVCompressError for an unknown one."""
    return sys.modules[find_command(name).__module__]


def find_command(name: str) -> Callable[[list[str]], int | None]:
    """Return the function that runs a command with its arguments and may return an exit code.

    Raises KVCompressError for an unknown command.
    """
    if name in registered().names:
        return registered()[name].load()
    if name in OWN:
        return import_module(OWN[name]).main
    raise unknown_name("there is no command", name, commands())


def overview() -> str:
    """Return all commands with a one-line summary each."""
    lines = [f"  {name:<12} {summary(name)}" for name in commands()]
    return "\n".join(["usage: kvcompress COMMAND ...", "", *lines, "", "kvcompress COMMAND --help says more."])


def summary(name: str) -> str:
    """Return the first line of a command's docstring, without the command itself if it comes first."""
    line = (module_of(name).__doc__ or "").strip().partition("\n")[0]
    return re.sub(r"^`[^`]*`: ", "", line).rstrip(".:")


def complete() -> None:
    """Complete a command line for the shell (argcomplete); return if no completion is requested."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argparse

    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    if len(words) > 1 and words[1] in commands():
        os.environ["_ARGCOMPLETE"] = str(int(os.environ["_ARGCOMPLETE"]) + 1)  # number of words in the command's name
        parser = module_of(words[1]).parser()
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("command", choices=commands())
    argcomplete.autocomplete(parser)


def run(arguments: list[str]) -> int | None:
    """Run a command from its arguments and return its exit code, if any. Raises what the command raises."""
    name, *rest = arguments or [""]
    if name in ("", "-h", "--help"):
        print(overview() if name else f"{overview()}\n\n{BEGIN}")
        return 0
    if name == "--version":
        print(f"kvcompress {__version__}")
        return 0
    check_environment(VARIABLES)
    return find_command(name)(rest)


def main(arguments: list[str]) -> int:
    """Run a command and return its exit code, see `command_line.exit_code`. Errors end with one line on stderr."""
    return exit_code(run, arguments)


def console() -> None:
    """Entry point of the console command `kvcompress`."""
    complete()
    leave(main(sys.argv[1:]))


if __name__ == "__main__":
    console()
