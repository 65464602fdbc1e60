"""`kvcompress COMMAND ...`, or `python -m kvcompress COMMAND ...`.

Other packages add commands by entry points of the group `kvcompress.commands`: a function that takes the arguments, in
a module whose docstring begins with a line about the command, and whose `parser()` makes its parser. One of the name of
a command here goes before it. No module of a command imports anything heavy before it runs.
"""

import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType

from .command_line import exit_code
from .errors import KVCompressError, shown, unknown_name
from .version import __version__

GROUP = "kvcompress.commands"
OWN = {  # a module with `main(arguments)`
    "bench": "kvcompress.bench.command",
    "calibrate": "kvcompress.calibration.command",
    "check": "kvcompress.check.command",
    "list": "kvcompress.list_command",
    "speech": "kvcompress.speech.command",
}
BEGIN = """To begin:
  kvcompress list methods                           every method, with its paper
  kvcompress eval                                   accuracy against ratio on the bundled model; no GPU, no model hub
  kvcompress eval textvqa_val MODEL snapkv 0.2      a benchmark of lmms-eval under a method and a ratio

`eval` and all that reads its results come with: pip install 'kvcompress[eval]'"""

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


def commands() -> list[str]:
    """The names of all commands."""
    return sorted({*OWN, *entry_points(group=GROUP).names})


def module_of(name: str) -> ModuleType:
    """The module of a command. Raises KVCompressError for an unknown one."""
    return sys.modules[find_command(name).__module__]


def find_command(name: str) -> Callable[[list[str]], int | None]:
    """The function that runs a command, given its arguments; what it returns, if anything, is the exit code.

    Raises KVCompressError for an unknown one.
    """
    registered = entry_points(group=GROUP)
    if name in registered.names:
        return registered[name].load()
    if name in OWN:
        return import_module(OWN[name]).main
    raise unknown_name("there is no command", name, commands())


def overview() -> str:
    """All commands with the first line of what they say of themselves."""
    lines = [f"  {name:<12} {summary(name)}" for name in commands()]
    return "\n".join(["usage: kvcompress COMMAND ...", "", *lines, "", "kvcompress COMMAND --help says more."])


def summary(name: str) -> str:
    """A command in a line, without the command itself where that stands first."""
    line = (module_of(name).__doc__ or "").strip().partition("\n")[0]
    return re.sub(r"^`[^`]*`: ", "", line).rstrip(".:")


def complete() -> None:
    """Answer the shell that asks how a command line may go on (argcomplete); returns where none asks."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argparse

    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    if len(words) > 1 and words[1] in commands():
        os.environ["_ARGCOMPLETE"] = str(int(os.environ["_ARGCOMPLETE"]) + 1)  # so many words are the command's name
        parser = module_of(words[1]).parser()
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("command", choices=commands())
    argcomplete.autocomplete(parser)


def run(arguments: list[str]) -> int | None:
    """Run what the arguments say; its exit code, if it returns one. Raises what the command raises."""
    name, *rest = arguments or [""]
    if name in ("", "-h", "--help"):
        print(overview() if name else f"{overview()}\n\n{BEGIN}")
        return 0
    if name == "--version":
        print(f"kvcompress {__version__}")
        return 0
    check_environment()
    return find_command(name)(rest)


def main(arguments: list[str]) -> int:
    """Run a command; its exit code, as `command_line.exit_code` has it. Every error ends with one line on stderr."""
    return exit_code(run, arguments)


def console() -> None:
    """The console command `kvcompress`."""
    complete()
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    console()
