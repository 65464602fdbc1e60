"""`python -m kvcompress COMMAND ...`."""

import sys
from importlib import import_module

from .errors import KVCompressError, unknown_name

COMMANDS = {
    "bench": "kvcompress.bench.cli",
    "report": "lmms_eval_plugins.report.html.report_command",
    "show": "lmms_eval_plugins.report.html.show",
    "speech": "kvcompress.bench.speech",
}  # a module with `main(arguments)`


def main(arguments: list[str]) -> int:
    """Run a command; 2 and one line on stderr for what the user can correct."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: python -m kvcompress {{{','.join(COMMANDS)}}} ...\n\nCOMMAND --help says more.")
        return 0
    try:
        if name not in COMMANDS:
            raise unknown_name("there is no command", name, COMMANDS)
        import_module(COMMANDS[name]).main(rest)
    except KVCompressError as error:
        print(f"kvcompress: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
