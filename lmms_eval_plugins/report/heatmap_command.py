"""`kvcompress heatmap`: draw scores by two columns of a task's questions, such as length and depth.

For the tasks of `kvcompress long-pack` the columns are the prompt's length and the needle's depth; any columns of a
task will do. Beside the cells, the command writes `heatmap-<x>-<y>[-...].png`, with a panel for each method and ratio,
and the same numbers as `.csv`. It prints the scores by each column alone. Only cells with the same settings share a
figure.
"""

import argparse

from kvcompress.command_line import Parser, returns_exit_code
from kvcompress.flag_types import folder, label, shown


def condition(text: str) -> tuple[str, str]:
    """Parse `kind=counting` into ("kind", "counting")."""
    name, equals, value = text.partition("=")
    if not (equals and name and value and text.isprintable()):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not COLUMN=VALUE")
    return name, value


def parser() -> argparse.ArgumentParser:
    this = Parser(
        "heatmap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = this.add_argument
    add("folder", type=folder, help="results/<task>/<model>")
    add("--x", type=label, default="length", help="the questions' column on the horizontal axis (length)")
    add("--y", type=label, default="depth", help="the questions' column on the vertical axis (depth)")
    add("--where", type=condition, metavar="COLUMN=VALUE", help="only these questions, e.g. kind=counting")
    add("--metric", type=label, help="the task's metric to show, in place of its main one")
    add("--filter", type=label, help="the answer filter to use, in place of the first one")
    return this


@returns_exit_code("files")
def main(argv: list[str]) -> None:
    """Write the figures and their numbers."""
    flags = parser().parse_args(argv)
    from .heatmap import write

    write(flags)
