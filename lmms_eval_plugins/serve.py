"""`kvcompress serve`: answer OpenAI's chat completions with a compressed cache, many requests at a time.

The command is the core's; here MODEL may also be `tiny`, the bundled model.
"""

from kvcompress.command_line import exit_code
from kvcompress.serve.command import parser, serve

from .cells.request import BUNDLED_MODEL

__all__ = ["main", "parser"]


def command(argv: list[str]) -> None:
    """Serve until the process is asked to end. Raises KVCompressError."""
    flags = parser().parse_intermixed_args(argv)
    if flags.model == BUNDLED_MODEL:
        from .model.arguments import TINY_CHECKPOINT

        flags.model, flags.name = str(TINY_CHECKPOINT), flags.name or BUNDLED_MODEL
    serve(flags)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; every error is one line on stderr."""
    return exit_code(command, argv)
