"""`kvcompress table`: write the table and plots of each task and model, as an evaluation does.

Only cells with the same run settings (limit, dtype, ...) are comparable, so each set of settings gets its own
table and plots, written beside the cells as `report[-key=value...].md` and `.png`, and `throughput[-...].png`.
"""

import argparse

from kvcompress.command_line import Parser, returns_exit_code
from kvcompress.flag_types import folder, label

from ..cells.errors import EvaluationFailed


def parser() -> argparse.ArgumentParser:
    this = Parser("table", description=__doc__)
    this.add_argument("folder", type=folder, help="results, results/<task> or results/<task>/<model>")
    this.add_argument("--metric", type=label, help="the task's metric to show, in place of its main one")
    this.add_argument("--filter", type=label, help="the answer filter to use, in place of the first one")
    return this


@returns_exit_code("files")
def main(argv: list[str]) -> None:
    """Write table and plots."""
    flags = parser().parse_args(argv)
    from kvcompress.files import check_output

    from .groups import cell_folders
    from .table import report

    cells = [cell for cell in cell_folders(flags.folder) if not cell.name.startswith(".")]
    folders = {cell.parent for cell in cells} or {flags.folder}
    for each in folders:
        check_output(each)
    try:
        for each in sorted(folders):
            report(each, metric=flags.metric, metric_filter=flags.filter)
    except FileNotFoundError as error:
        raise EvaluationFailed(error) from error
