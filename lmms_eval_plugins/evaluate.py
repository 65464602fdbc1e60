"""The command behind `scripts/run_eval.sh`: methods x ratios x tasks on one loaded model, through lmms-eval.

    python -m lmms_eval_plugins.evaluate TASK MODEL METHOD RATIO [flags] [key=value ...]
    python -m lmms_eval_plugins.evaluate list tasks|methods|models [WORD]

lmms-eval runs in this process. Its own command line exits with 0 when an evaluation fails; this one exits with 0
only where the results of every cell are complete on disk, with 2 for bad input, with 1 where something else is
wrong, with 128 and the signal's number after Ctrl-C (130), SIGTERM or SIGHUP.
"""

import os
import sys

from .cells.cell_log import CellLog
from .cells.command_line import parse
from .cells.errors import exit_code
from .cells.inspection import show_config
from .cells.listing import show_list
from .cells.machine import check_environment, number_of_processes, rank, say, set_offline
from .cells.names import check_names
from .cells.plan import Plan, check_folders
from .cells.processes import run_ranks
from .cells.run import evaluate_cells, load_model, quiet


def evaluate(argv: list[str]) -> int:
    """Evaluate every cell that is asked for; the exit code. Raises UsageError, KVCompressError or EvaluationFailed."""
    if argv[:1] == ["list"]:
        show_list(argv[1:])
        return 0
    check_environment()
    request = parse(argv)
    check_names(request)
    set_offline(request)
    return run(Plan.of(request), argv)


def run(plan: Plan, argv: list[str]) -> int:
    """Evaluate every cell that is not complete on disk, then report. `argv`: what several ranks are started with."""
    flags = plan.request.flags
    processes = number_of_processes()
    plan.check_machine(processes)
    if processes > 1 and "LOCAL_RANK" not in os.environ:
        return run_ranks(processes, argv)

    quiet(flags.verbosity)
    log = CellLog(plan)
    jobs = plan.jobs()
    if rank() == 0:
        check_folders(jobs)
    todo = {job.folder: reason for job in jobs if (reason := job.todo)}
    pending = [job for job in jobs if job.folder in todo]
    if skipped := len(jobs) - len(pending):
        say(f"{skipped} of {len(jobs)} cells are complete and skipped (--force computes them again)")
    for job in pending:
        if job.folder.exists():
            say(f"computed again: {job.folder.name} ({todo[job.folder]})")
    for job in jobs:
        if job.folder not in todo:
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
    return 0


def main(argv: list[str] | None = None) -> int:
    """The exit code; every error ends with one line on stderr."""
    return exit_code(evaluate, argv, "cells")


if __name__ == "__main__":
    sys.exit(main())
