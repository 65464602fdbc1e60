"""The table and the plot of a sweep: `python -m lmms_eval_plugins.report results/<task>/<model>`.

Only cells with the same run settings (limit, dtype, ...) are comparable, so each set of settings gets its own
table and plots, written beside the cells as `report[-key=value...].md` and `.png`, and `throughput[-...].png`.
"""

import argparse
import sys

from kvcompress.files import check_output

from ..cells.command_line import Parser
from ..cells.errors import EvaluationFailed, exit_code
from ..cells.flag_types import folder, label
from .folder import report


def parser() -> argparse.ArgumentParser:
    this = Parser(prog="python -m lmms_eval_plugins.report", description=__doc__)
    this.add_argument("folder", type=folder, help="results/<task>/<model>")
    this.add_argument("--metric", type=label, help="of the task, in place of its main one")
    this.add_argument("--filter", type=label, help="of the task's answers, in place of the first one")
    return this


def command(argv: list[str]) -> None:
    """Write table and plot. Raises UsageError, KVCompressError, or EvaluationFailed where there is no finished cell."""
    flags = parser().parse_args(argv)
    check_output(flags.folder)
    try:
        report(flags.folder, metric=flags.metric, metric_filter=flags.filter)
    except FileNotFoundError as error:
        raise EvaluationFailed(error) from error


def main(argv: list[str] | None = None) -> int:
    """The exit code; every error ends with one line on stderr."""
    return exit_code(command, argv, "files")


if __name__ == "__main__":
    sys.exit(main())
