"""`kvcompress reproduce`: run a paper's grid and tabulate the results beside the paper's.

    kvcompress reproduce NAME [--limit N] [--only model=...,task=...,method=...,ratio=...] [...]

NAME is a file of `configs/reproduce` or a path. `lmms_eval_plugins.evaluate` runs the cells, in one process per model,
task and set of options, so that complete cells are skipped and a failure stops nothing else.
"""

import argparse
import sys
from pathlib import Path

from kvcompress.command_line import Parser, check_environment, returns_exit_code
from kvcompress.flag_types import count_or_fraction, folder, label, path

from ..cells.machine import VARIABLES
from ..evaluate import parse


def parser() -> argparse.ArgumentParser:
    this = Parser(
        "reproduce",
        description="Run a paper's grid and write a table of our results beside the paper's. Other flags and key=value "
        "arguments go to eval.",
    )
    add = this.add_argument
    add(
        "name",
        type=label,
        help="a file of configs/reproduce (effivlm_bench, vl_cache, snapkv, reasoning, video, tiny, ...) or a path",
    )
    add("--limit", type=count_or_fraction, metavar="N", help="questions per task")
    add(
        "--only",
        type=label,
        action="append",
        default=[],
        metavar="PART=VALUE,...",
        help="model=, task=, method=, ratio=; repeat one to allow several values",
    )
    add("--output_path", type=path, default=Path("results"), metavar="DIR", help="root of the results (results)")
    add("--model-root", type=folder, metavar="DIR", help="models downloaded by hand: DIR/NAME for ORG/NAME")
    add("--report-only", action="store_true", help="write the table of what is on disk; run nothing")
    add("--dry-run", action="store_true", help="list cells and commands; run and write nothing")
    add("--write-reference", type=path, metavar="CSV", help="write our results as a reference")
    return this


@returns_exit_code("cells")
def main(argv: list[str]) -> int:
    """Run the grid, write the table, and return the exit code. The table is written unless the input is bad.

    0: every cell that lmms-eval can run has a result. 1: a cell failed, or this machine lacks a GPU or model for it.
    Other codes are those of the evaluation command.
    """
    check_environment(VARIABLES)
    flags, extra = parser().parse_known_args(argv)
    parse(["tiny_textvqa", "tiny", "full", "1", *extra])  # to report a wrong flag at once
    from .grid import reproduce

    return reproduce(flags, extra)


if __name__ == "__main__":
    sys.exit(main())
