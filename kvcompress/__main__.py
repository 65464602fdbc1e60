"""`python -m kvcompress COMMAND ...`.

Other packages add commands of their own by entry points of the group `kvcompress.commands`.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from .errors import KVCompressError, unknown_name

GROUP = "kvcompress.commands"
OWN = {"bench": "kvcompress.bench.cli", "speech": "kvcompress.bench.speech"}  # a module with `main(arguments)`


def find_command(name: str) -> Callable[[list[str]], object]:
    """The function that runs a command, given its arguments. Raises KVCompressError for an unknown one."""
    if name in OWN:
        return import_module(OWN[name]).main
    registered = entry_points(group=GROUP)
    if name in registered.names:
        return registered[name].load()
    error = unknown_name("there is no command", name, {*OWN, *registered.names})
    raise KVCompressError(f"{error}; a package's commands are known once it is installed anew: pip install -e .")


def main(arguments: list[str]) -> int:
    """Run a command; 2 and one line on stderr for what the user can correct."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        names = sorted({*OWN, *entry_points(group=GROUP).names})
        print(f"usage: python -m kvcompress {{{','.join(names)}}} ...\n\nCOMMAND --help says more.")
        return 0
    try:
        find_command(name)(rest)
    except KVCompressError as error:
        print(f"kvcompress: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
