"""The table and the plot of a sweep: `python -m lmms_eval_plugins.report results/<task>/<model>`.

Only cells with the same run settings (limit, dtype, ...) are comparable, so each set of settings gets its own
table and plot, written beside the cells as `report[-key=value...].md` and `.png`.
"""

import argparse
import sys

from kvcompress.files import check_output

from ..cells.command_line import Parser
from ..cells.errors import EvaluationFailed, exit_code
from ..cells.flag_types import folder
from .table import report


def parser() -> argparse.ArgumentParser:
    this = Parser(prog="python -m lmms_eval_plugins.report", description=__doc__)
    this.add_argument("folder", type=folder, help="results/<task>/<model>")
    return this


def command(argv: list[str]) -> None:
    """Write table and plot. Raises UsageError, KVCompressError, or EvaluationFailed where there is no finished cell."""
    folder = parser().parse_args(argv).folder
    check_output(folder)
    try:
        report(folder)
    except FileNotFoundError as error:
        raise EvaluationFailed(error) from error


def main(argv: list[str] | None = None) -> int:
    """The exit code; every error ends with one line on stderr."""
    return exit_code(command, argv, "files")


if __name__ == "__main__":
    sys.exit(main())
