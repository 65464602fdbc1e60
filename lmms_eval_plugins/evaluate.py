"""The command behind `scripts/run_eval.sh`: methods x ratios x tasks on one loaded model, through lmms-eval.

    python -m lmms_eval_plugins.evaluate TASK MODEL METHOD RATIO [flags] [key=value ...]
    python -m lmms_eval_plugins.evaluate list tasks|methods|models [WORD]

lmms-eval runs in this process. Its own command line exits with 0 when an evaluation fails; this one exits with 0
only where the results of every cell are complete on disk, with 2 for bad input, with 1 where something else is
wrong, with 130 after Ctrl-C.
"""

import os
import sys

from .cells.cell_log import CellLog
from .cells.command_line import parse
from .cells.errors import exit_code
from .cells.inspection import show_config
from .cells.listing import show_list
from .cells.machine import launch_ranks, rank, say, set_offline
from .cells.plan import Plan
from .cells.run import evaluate_cells, load_model, quiet


def evaluate(argv: list[str]) -> None:
    """Evaluate every cell that is asked for. Raises UsageError, KVCompressError or EvaluationFailed."""
    if argv[:1] == ["list"]:
        return show_list(argv[1:])
    request = parse(argv)
    set_offline(request)
    run(Plan.of(request), argv)


def run(plan: Plan, argv: list[str]) -> None:
    """Evaluate every cell that is not complete on disk, then report. `argv`: what several ranks are started with."""
    flags = plan.request.flags
    processes = int(os.environ.get("NUM_PROCESSES", 1))
    plan.check_machine(processes)
    if processes > 1 and "LOCAL_RANK" not in os.environ:
        launch_ranks(processes, argv)

    quiet(flags.verbosity)
    log = CellLog(plan)
    jobs = plan.jobs()
    complete, pending = [], []
    for job in jobs:
        (pending if job.todo else complete).append(job)
    if complete:
        say(f"{len(complete)} of {len(jobs)} cells are complete and skipped (--force computes them again)")
    for job in pending:
        if job.folder.exists():
            say(f"computed again: {job.folder.name} ({job.todo})")
    for job in complete:
        log(job)
    if pending:
        evaluate_cells(load_model(plan.arguments), pending, log)
    if rank() == 0:
        from .report.table import report

        for folder in dict.fromkeys(job.folder.parent for job in jobs):
            report(folder, plan.settings)
        if flags.show_config:
            for job in {job.cell.task: job for job in jobs}.values():
                show_config(job.folder)
    log.check()


def main(argv: list[str] | None = None) -> int:
    """The exit code; every error ends with one line on stderr."""
    return exit_code(evaluate, argv, "cells")


if __name__ == "__main__":
    sys.exit(main())
