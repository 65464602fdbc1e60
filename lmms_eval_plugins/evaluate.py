"""The command behind `scripts/run_eval.sh`: methods x ratios x tasks on one loaded model, through lmms-eval.

    python -m lmms_eval_plugins.evaluate TASK MODEL METHOD RATIO [flags] [key=value ...]

lmms-eval runs in this process. Its own command line exits with 0 when an evaluation fails; this one exits with 0
only where the results of every cell are complete on disk, with 2 for bad input, with 1 where something else is
wrong, with 130 after Ctrl-C.
"""

import os
import sys
import traceback

from .cells.command_line import Request, parse
from .cells.data import find_data_root
from .cells.errors import EvaluationFailed, UsageError
from .cells.kept_tokens import overlays_asked
from .cells.machine import check_device, check_model_is_local, is_offline, launch_ranks, rank, say, set_offline
from .cells.plan import check_arguments, find_jobs
from .cells.run import evaluate_cells, load_model, quiet


def run(request: Request, argv: list[str]) -> None:
    """Evaluate every cell that is not complete on disk, then report."""
    flags = request.flags
    data_root = find_data_root(flags)
    processes = int(os.environ.get("NUM_PROCESSES", 1))

    arguments, cells = check_arguments(request)
    check_device(arguments.device, processes)
    if is_offline():
        check_model_is_local(arguments)
    if processes > 1 and "LOCAL_RANK" not in os.environ:
        launch_ranks(processes, argv)

    quiet(flags.verbosity)
    manager, jobs = find_jobs(request, arguments, cells, data_root)
    pending = [job for job in jobs if flags.force or job.todo or overlays_asked(job.folder) < flags.overlays]
    if skipped := len(jobs) - len(pending):
        say(f"{skipped} of {len(jobs)} cells are complete and skipped (--force computes them again)")
    for job in pending:
        if job.folder.exists():
            say(f"computed again: {job.folder.name} ({job.todo or ('--force' if flags.force else '--overlays')})")
    if pending:
        evaluate_cells(load_model(arguments), pending, manager, flags, data_root)
    if rank() == 0:
        from .report import report

        for folder in dict.fromkeys(job.folder.parent for job in jobs):
            report(folder, jobs[0].cell.settings)


def main(argv: list[str] | None = None) -> int:
    """The exit code; every error ends with one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return evaluate(argv)
    except KeyboardInterrupt:
        return fail("interrupted; finished cells are kept, the same command goes on from there", 130)
    except Exception as error:
        traceback.print_exc()
        return fail(f"{type(error).__name__}: {error}", 1)


def evaluate(argv: list[str]) -> int:
    """The exit code, where nothing unforeseen happens."""
    try:
        request = parse(argv)
    except UsageError as error:
        return fail(error, 2)
    set_offline(request)
    from kvcompress import KVCompressError  # takes seconds: torch and transformers come with it

    try:
        run(request, argv)
    except (UsageError, KVCompressError) as error:
        return fail(error, 2)
    except EvaluationFailed as error:
        return fail(error, 1)
    return 0


def fail(error: object, code: int) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
