"""The command behind `scripts/run_eval.sh`: methods x ratios x tasks on one loaded model, through lmms-eval.

    python -m lmms_eval_plugins.evaluate TASK MODEL METHOD RATIO [flags] [key=value ...]

lmms-eval runs in this process. Its own command line exits with 0 when an evaluation fails; this one exits with 0
only where the results of every cell are complete on disk, with 2 for bad input, with 1 where something else is
wrong, with 130 after Ctrl-C.
"""

import os
import sys

from .cells.command_line import parse
from .cells.errors import exit_code
from .cells.machine import check_environment, launch_ranks, processes, rank, say, set_offline
from .cells.names import check_names
from .cells.plan import Plan
from .cells.run import evaluate_cells, load_model, quiet


def evaluate(argv: list[str]) -> None:
    """Evaluate every cell that is asked for. Raises UsageError, KVCompressError or EvaluationFailed."""
    check_environment()
    request = parse(argv)
    check_names(request)
    set_offline(request)
    run(Plan.of(request), argv)


def run(plan: Plan, argv: list[str]) -> None:
    """Evaluate every cell that is not complete on disk, then report. `argv`: what several ranks are started with."""
    flags = plan.request.flags
    plan.check_machine(processes())
    if processes() > 1 and "LOCAL_RANK" not in os.environ:
        launch_ranks(processes(), argv)

    quiet(flags.verbosity)
    jobs = plan.jobs()
    pending = [job for job in jobs if job.todo]
    if skipped := len(jobs) - len(pending):
        say(f"{skipped} of {len(jobs)} cells are complete and skipped (--force computes them again)")
    for job in pending:
        if job.folder.exists():
            say(f"computed again: {job.folder.name} ({job.todo})")
    if pending:
        evaluate_cells(load_model(plan.arguments), pending)
    if rank() == 0:
        from .report.table import report

        for folder in dict.fromkeys(job.folder.parent for job in jobs):
            report(folder, plan.settings)


def main(argv: list[str] | None = None) -> int:
    """The exit code; every error ends with one line on stderr."""
    return exit_code(evaluate, argv, "cells")


if __name__ == "__main__":
    sys.exit(main())
