"""`kvcompress eval`: evaluate a model under methods and ratios, with lmms-eval; without arguments, a demo.

    kvcompress eval TASK MODEL METHOD RATIO [flags] [key=value ...]

lmms-eval runs in this process. Its own command exits with 0 when an evaluation fails; this one exits with 0 only if the
results of every cell are complete on disk, with 2 for bad input, with 1 for any other failure, and with 128 plus the
signal's number after Ctrl-C (130), SIGTERM or SIGHUP.
"""

import os

from kvcompress.command_line import exit_code, fail, leave
from kvcompress.errors import KVCompressError

from .cells.cell_log import CellLog
from .cells.command_line import flag_parser, parse
from .cells.errors import DamagedFile, EvaluationFailed
from .cells.failures import TaskFailures, run_tasks
from .cells.inspection import show_config
from .cells.listing import main as list_command
from .cells.machine import (
    check_environment,
    join_processes,
    number_of_processes,
    rank,
    say,
    set_offline,
    settled,
    uncollected,
)
from .cells.names import check_names
from .cells.plan import Plan, check_folders
from .cells.run import evaluate_cells, load_model, quiet, score_again

parser = flag_parser  # used by shell completion


def evaluate(argv: list[str]) -> int:
    """Evaluate the requested cells and return the exit code. Raises UsageError, KVCompressError or EvaluationFailed."""
    if argv[:1] == ["list"]:  # from scripts/run_eval.sh
        list_command(argv[1:])
        return 0
    check_environment()
    request = parse(argv)
    check_names(request)
    set_offline(request)
    with uncollected():
        plan = Plan.of(request, leaves_out=True)
    is_rank = "LOCAL_RANK" in os.environ  # the process that started the ranks reports for them
    for reason in [] if is_rank else plan.left_out.values():
        fail(f"{reason} (it is left out, the others continue)", 2)
    code = run(plan, argv)
    if plan.left_out and not code and not is_rank:
        raise KVCompressError("; ".join(plan.left_out.values()))
    return code


def run(plan: Plan, argv: list[str]) -> int:
    """Evaluate every cell that is not complete on disk, then report. `argv`: the arguments for several ranks."""
    flags = plan.request.flags
    processes = number_of_processes()
    plan.check_machine(processes)
    if processes > 1 and "LOCAL_RANK" not in os.environ:
        return run_tasks(processes, argv)

    join_processes()
    with uncollected():
        quiet(flags.verbosity)
    log = CellLog(plan)
    jobs, failures, managers = [], TaskFailures(plan.request.tasks), plan.managers()
    for task in plan.request.tasks:
        with failures.noted(task, (EvaluationFailed, DamagedFile)):
            jobs += plan.jobs_of(task, managers)
    if rank() == 0:
        check_folders(jobs)
    todo = {job.folder: reason for job in jobs if (reason := job.todo)}
    pending = [job for job in jobs if job.folder in todo]
    if skipped := len(jobs) - len(pending):
        say(f"{skipped} of {len(jobs)} cells are complete and skipped (--force computes them again)")
    for job in pending:
        if job.folder.exists():
            say(f"computing again: {job.folder.name} ({todo[job.folder]})")
    for job in jobs:
        if job.folder not in todo:
            log(job)
    answers = [job.kept_answers for job in pending]
    for job, kept in zip(pending, answers, strict=True):
        if kept is not None and job.cell.task not in failures.reasons:
            with failures.noted(job.cell.task):
                score_again(job, kept)
                log(job)
    unanswered = [job for job, kept in zip(pending, answers, strict=True) if kept is None]
    if unanswered := [job for job in unanswered if job.cell.task not in failures.reasons]:
        from .report.significance import power_line

        for job in {job.cell.task: job for job in unanswered}.values():
            say(power_line(job.cell.task, job.questions))
        lm = load_model(plan.arguments, plan.needs_template) if plan.server is None else plan.server.lm(plan.arguments)
        with settled():
            evaluate_cells(lm, unanswered, failures, log)
    if rank() == 0:
        from .report.folder import report

        complete = [job for job in jobs if job.incomplete is None]
        for folder, settings in {job.folder.parent: job.cell.settings for job in complete}.items():
            report(folder, settings, metric=plan.request.metric, metric_filter=plan.request.filter)
        if flags.show_config:
            for job in {job.cell.task: job for job in complete}.values():
                show_config(job.folder)
    failures.raise_all()
    log.check()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; every error is one line on stderr."""
    return exit_code(evaluate, argv, "cells")


if __name__ == "__main__":
    leave(main())
