"""`kvcompress metrics`: compute metrics of a grid of methods and ratios, and paired comparisons of two of them."""

import argparse

from kvcompress.command_line import Parser, returns_exit_code
from kvcompress.flag_types import folder, fraction, label, number


def parser() -> argparse.ArgumentParser:
    this = Parser("metrics", description=__doc__)
    add = this.add_argument
    add("folders", type=folder, nargs="+", metavar="results/TASK/MODEL", help="one folder per task, of the same model")
    add("--compare", nargs=2, type=label, metavar=("A", "B"), help="paired test of two methods, or one and `full`")
    add("--reference", type=label, metavar="METHOD", help="also test every method against this one at the same size")
    add("--margin", type=number(above=0), default=2, help="the loss that does not matter, in points (2)")
    add("--cluster", type=label, metavar="FIELD", help="the field by which questions belong together, e.g. image_id")
    add("--power", action="store_true", help="say what so many questions detect, and how many --margin takes")
    add("--points", type=number(0), default=1, help="the loss of score to allow, in points (1)")
    add("--from", type=fraction, dest="lowest", metavar="RATIO", help="where the area under the curve begins")
    add("--metric", type=label, help="the task's metric to show, in place of its main one")
    add("--filter", type=label, help="the answer filter to use, in place of the first one")
    add("--json", action="store_true", help="print JSON instead of tables")
    return this


@returns_exit_code("results")
def main(argv: list[str]) -> None:
    """Print the metrics."""
    flags = parser().parse_args(argv)
    from .metrics_tables import show_metrics

    show_metrics(flags)
