"""`kvcompress heatmap`: scores by two columns of a task's questions, such as length and depth.

For the tasks of `kvcompress long-pack` these are the length of the prompt and the needle's depth; any
columns of a task will do. Beside the cells it writes `heatmap-<x>-<y>[-...].png`, a panel for each method and ratio,
and the same numbers as `.csv`; it prints them by each column alone. Only cells with the same settings share a figure.
"""

import argparse

from kvcompress.command_line import Parser, exit_code
from kvcompress.flag_types import folder, label, shown


def condition(text: str) -> tuple[str, str]:
    """`kind=counting` -> ("kind", "counting")."""
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
    add("--x", type=label, default="length", help="column of the questions, from left to right (length)")
    add("--y", type=label, default="depth", help="column of the questions, from top to bottom (depth)")
    add("--where", type=condition, metavar="COLUMN=VALUE", help="only these questions, e.g. kind=counting")
    add("--metric", type=label, help="of the task, in place of its main one")
    add("--filter", type=label, help="of the task's answers, in place of the first one")
    return this


def command(argv: list[str]) -> None:
    """Write figure and numbers. Raises UsageError, KVCompressError or EvaluationFailed."""
    flags = parser().parse_args(argv)
    from .heatmap import write

    write(flags)


def main(argv: list[str]) -> int:
    """The exit code; every error ends with one line on stderr."""
    return exit_code(command, argv, "files")
