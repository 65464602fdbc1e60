"""`kvcompress bench`: measure the costs and savings of compression compared with other caches.

The command is the core's; here MODEL may also be `tiny`, the bundled model.
"""

from kvcompress.bench import command
from kvcompress.bench.command import parser

from .cells.request import BUNDLED_MODEL

__all__ = ["main", "parser"]


def main(arguments: list[str]) -> None:
    """Run the benchmark. Raises KVCompressError for wrong arguments, before anything is loaded."""
    if BUNDLED_MODEL in arguments:
        from kvcompress.bench.shapes import BUNDLED

        from .model.arguments import TINY_CHECKPOINT

        BUNDLED[BUNDLED_MODEL] = str(TINY_CHECKPOINT)
    command.main(arguments)
