"""The table and the plot of a sweep: `python -m lmms_eval_plugins.report results/<task>/<model>`.

Only cells with the same run settings (limit, dtype, ...) are comparable, so each set of settings gets its own
table and plot, written beside the cells as `report[-key=value...].md` and `.png`.
"""

import argparse
import sys
from pathlib import Path

from .table import report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lmms_eval_plugins.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="results/<task>/<model>")
    parser.add_argument("--metric", help="of the task, in place of its main one")
    parser.add_argument("--filter", help="of the task's answers, in place of the first one")
    flags = parser.parse_args(argv)
    try:
        report(flags.folder, metric=flags.metric, metric_filter=flags.filter)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
