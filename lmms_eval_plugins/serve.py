"""`kvcompress serve`: answer OpenAI's chat completions with a compressed cache, many requests at a time.

The command is the core's; here MODEL may also be `tiny`, the bundled model.
"""

from kvcompress.command_line import returns_exit_code
from kvcompress.serve.command import parser, serve

from .cells.request import BUNDLED_MODEL

__all__ = ["main", "parser"]


@returns_exit_code()
def main(argv: list[str]) -> None:
    """Serve until the process is asked to end."""
    flags = parser().parse_intermixed_args(argv)
    if flags.model == BUNDLED_MODEL:
        from .model.arguments import TINY_CHECKPOINT

        flags.model, flags.name = str(TINY_CHECKPOINT), flags.name or BUNDLED_MODEL
    serve(flags)
