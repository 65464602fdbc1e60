"""The command behind `scripts/reproduce.sh`: a paper's grid, run here, in a table beside the paper's numbers.

    python -m lmms_eval_plugins.reproduce NAME [--limit N] [--only model=...,task=...,method=...,ratio=...] [...]

NAME is a file of `configs/reproduce` or a path. Every cell is run by `lmms_eval_plugins.evaluate`, in a process per
model, task and set of options, so that complete cells are skipped and a failure stops nothing else.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from kvcompress.files import check_output

from ..cells.command_line import Parser
from ..cells.errors import UsageError, exit_code
from ..cells.flag_types import count_or_fraction, folder, label, path
from ..cells.identity import fingerprint
from ..cells.machine import check_environment
from ..cells.results import incomplete_reason
from .config import load_config, load_reference
from .plan import PlannedCell, Run, parse_only, plan
from .run import cannot_run, run_all
from .table import SUFFIXES, row, write_reference, write_report


def main(argv: list[str] | None = None) -> int:
    """The exit code. The table is written in all cases but bad input.

    0: every cell that lmms-eval can do has a result. 1: one failed, or this machine has no GPU or model for it. Others
    are those of the evaluation command.
    """
    return exit_code(reproduce, argv, "cells")


def reproduce(argv: list[str]) -> int:
    """Plan the cells, run those that can be run, write the table; the exit code."""
    check_environment()
    flags, extra = parser().parse_known_args(argv)
    config, path = load_config(flags.name, flags.model_root)
    reference = load_reference(config, path)
    extra += ["--output_path", str(flags.output_path)] + (["--limit", str(flags.limit)] if flags.limit else [])
    cells, runs = plan(config, parse_only(flags.only or "", config), extra)
    if not cells:
        raise UsageError(f"--only {flags.only}: no cell has all of that")
    run_of = {cell.key: run for run in runs for cell in run.cells}
    reasons = {cell.key: cannot_run(cell, run_of.get(cell.key)) for cell in cells}
    if flags.dry_run:
        print("\n".join(listing(cells, run_of, reasons)))
        return 0

    name = "-".join(["reproduce", path.stem, *([f"limit={flags.limit}"] if flags.limit else [])])
    check_output(flags.output_path, *(name + suffix for suffix in SUFFIXES))
    if flags.write_reference:
        check_output(flags.write_reference.parent, flags.write_reference.name)
    possible = [run for run in runs if reasons[run.cells[0].key] is None]
    failed: dict[tuple[str, ...], str] = {}
    interruption = None
    if not flags.report_only:
        try:
            run_all(possible, failed)
        except KeyboardInterrupt as error:
            interruption = error
    rows = [row(cell, reference, failed.get(cell.key) or reasons[cell.key] or "not run") for cell in cells]
    for file in write_report(config, rows, flags.output_path / name):
        print(f"written: {file}")
    if flags.write_reference:
        write_reference(rows, flags.write_reference)
        print(f"written: {flags.write_reference}")
    print(f"{sum(row.ours is not None for row in rows)} of {len(rows)} cells have a result")
    if interruption is not None:
        raise interruption
    return int(not flags.report_only and (bool(failed) or len(possible) < len(runs)))


def listing(
    cells: list[PlannedCell], run_of: dict[tuple[str, ...], Run], reasons: dict[tuple[str, ...], str | None]
) -> Iterator[str]:
    """The lines of `--dry-run`."""
    for cell in cells:
        yield f"{', '.join(cell.key)}: {state(cell, run_of.get(cell.key), reasons[cell.key])}"
    for run in {id(run): run for run in run_of.values()}.values():
        if reasons[run.cells[0].key] is None:
            yield shlex.join(["./scripts/run_eval.sh", *run.argv])


def state(cell: PlannedCell, run: Run | None, reason: str | None) -> str:
    """What a run would do with a cell: nothing, for `reason` or as its results are on disk. The task's data is not
    loaded: whether that has changed shows only in a run."""
    if run is None or not cell.folder.exists():
        return reason or "to run"
    found = fingerprint(cell.asked[0], run.arguments, cell.asked[1], data={}, tasks={})
    again = incomplete_reason(cell.folder, found, unknown=("data", "tasks"))
    if again is None and run.request.flags.force:
        again = "--force"
    return "on disk" if again is None else reason or f"to run again ({again})"


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="reproduce.sh",
        allow_abbrev=False,
        description="Run a paper's grid and write a table of ours against theirs. What is not listed below (flags and "
        "key=value) goes to run_eval.sh.",
    )
    add = parser.add_argument
    add(
        "name",
        type=label,
        help="a file of configs/reproduce (effivlm_bench, vl_cache, snapkv, reasoning, video, tiny, ...) or a path",
    )
    add("--limit", type=count_or_fraction, metavar="N", help="questions per task")
    add(
        "--only",
        type=label,
        metavar="PART=VALUE,...",
        help="model=, task=, method=, ratio=; several of one are either",
    )
    add("--output_path", type=path, default=Path("results"), metavar="DIR", help="root of the results (results)")
    add("--model-root", type=folder, metavar="DIR", help="models downloaded by hand: DIR/NAME for ORG/NAME")
    add("--report-only", action="store_true", help="the table of what is on disk; run nothing")
    add("--dry-run", action="store_true", help="list cells and commands; run and write nothing")
    add("--write-reference", type=path, metavar="CSV", help="write our results as a reference")
    return parser


if __name__ == "__main__":
    sys.exit(main())
