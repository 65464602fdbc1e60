"""`kvcompress eval`: evaluate a model under methods and ratios, with lmms-eval; without arguments, a demo.

    kvcompress eval TASK MODEL METHOD RATIO [flags] [key=value ...]

lmms-eval runs in this process. Its own command exits with 0 when an evaluation fails; this one exits with 0 only if the
results of every cell are complete on disk, with 2 for bad input, with 1 for any other failure, and with 128 plus the
signal's number after Ctrl-C (130), SIGTERM or SIGHUP.
"""

import argparse
import json
import os
import re
from pathlib import Path

from kvcompress.command_line import check_environment, exit_code, fail, leave
from kvcompress.errors import KVCompressError
from kvcompress.flag_types import NUMBER, fraction, shown, whole

from .cells.cell_log import CellLog
from .cells.errors import DamagedFile, EvaluationFailed, UsageError
from .cells.inspection import show_config
from .cells.kept_answers import KeptAnswers
from .cells.listing import main as list_command
from .cells.machine import (
    VARIABLES,
    join_processes,
    number_of_processes,
    rank,
    say,
    set_offline,
    settled,
    uncollected,
)
from .cells.names import check_names
from .cells.plan import Job, Plan, check_folders
from .cells.processes import STARTED_BY, TaskFailures, end_with_parent, run_tasks
from .cells.request import BUNDLED_MODEL, USAGE, Request, arguments_of, check_known, flag_parser
from .cells.run import evaluate_cells, load_model, quiet, score_again

# Flag -> the model argument that it sets.
AS_ARGUMENTS = {
    "batch_size": "batch_size",
    "max_batch_size": "max_batch_size",
    "device": "device",
    "system_instruction": "system_prompt",
    "apply_chat_template": "chat_template",
}

# In the demo only about 25 text tokens follow the image, so SnapKV's usual window of 32 would reach into the image;
# 8 does not. Batches of 4 take half the time of single questions and give the same answers.
DEMO = ["tiny_textvqa", "tiny", "full,streamingllm,snapkv,random", "0.5,0.2,0.1,0.05"]
DEMO_LIMIT = 250
DEMO_OVERLAYS = 12  # enough to look at in a report
# KVCache-Factory's benchmarks use kernel 7 and max pooling with that window.
DEMO_ARGUMENTS = {"window_size": 8, "kernel_size": 7, "pooling": "max", "batch_size": 4}

HUB_ID = re.compile(r"(\w([\w.-]*\w)?/)?\w([\w.-]{,94}\w)?", re.ASCII)

parser = flag_parser  # used by shell completion


def evaluate(argv: list[str]) -> int:
    """Evaluate the requested cells and return the exit code. Raises UsageError, KVCompressError or EvaluationFailed."""
    if argv[:1] == ["list"]:  # from scripts/run_eval.sh
        list_command(argv[1:])
        return 0
    is_rank = "LOCAL_RANK" in os.environ  # the process that started the ranks reports for them
    if is_rank or STARTED_BY in os.environ:
        end_with_parent()
    check_environment(VARIABLES)
    request = parse(argv)
    check_names(request)
    set_offline(request)
    with uncollected():
        plan = Plan.of(request, leaves_out=True)
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
    jobs, failures = [], TaskFailures(plan.request.tasks)
    for task in plan.request.tasks:
        with failures.noted(task, (EvaluationFailed, DamagedFile)):
            jobs += plan.jobs_of(task)
    if rank() == 0:
        check_folders(jobs)
    todo, kept = _on_disk(jobs)
    pending = [job for job in jobs if job.folder in todo]
    if skipped := len(jobs) - len(pending):
        say(f"{skipped} of {len(jobs)} cells are complete and skipped (--force computes them again)")
    for job in pending:
        if job.folder.exists():
            say(f"computing again: {job.folder.name} ({todo[job.folder]})")
    for job in jobs:
        if job.folder not in todo:
            log(job)
            failures.working.add(job.cell.task)
    for job in pending:
        if job.folder in kept and job.cell.task not in failures.reasons:
            with failures.noted(job.cell.task):
                score_again(job, kept[job.folder])
                log(job)
                failures.working.add(job.cell.task)
    asked = [job for job in pending if f"{job.cell.task}/{job.name}" not in failures.left_out]
    if unanswered := [job for job in asked if job.folder not in kept and job.cell.task not in failures.reasons]:
        from .report.significance import power_line

        for job in {job.cell.task: job for job in unanswered}.values():
            say(power_line(job.cell.task, job.questions))
        lm = load_model(plan.arguments, plan.needs_template) if plan.server is None else plan.server.lm(plan.arguments)
        with settled():
            evaluate_cells(lm, unanswered, failures, log)
    if rank() == 0:
        from .report.table import report

        complete = [job for job in jobs if job.folder not in todo or job.incomplete is None]
        for folder, settings in {job.folder.parent: job.cell.settings for job in complete}.items():
            report(folder, settings, metric=plan.request.metric, metric_filter=plan.request.filter)
        if flags.show_config:
            for job in {job.cell.task: job for job in complete}.values():
                show_config(job.folder)
    failures.raise_all()
    log.check()
    if rank() == 0 and jobs and not complete:
        raise EvaluationFailed("none of the methods supports these prompts: there are no results")
    return 0


def _on_disk(jobs: list[Job]) -> tuple[dict[Path, str], dict[Path, KeptAnswers]]:
    """Return folder -> why its cell must be computed, for those that must; and folder -> the unscored answers of an
    earlier run, where there are some. Of several ranks the first decides: a slower one may find what another wrote."""
    todo = {job.folder: reason for job in jobs if (reason := job.todo)}
    kept = {job.folder: answers for job in jobs if job.folder in todo and (answers := job.kept_answers) is not None}
    if "LOCAL_RANK" not in os.environ:
        return todo, kept
    from .model.ranks import of_each_rank

    return of_each_rank((todo, kept))[0]


# -- the command line


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = flag_parser()
    flags, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        check_known(unknown[0], list(parser._option_string_actions))
    bare, name = "--apply_chat_template", flags.apply_chat_template
    is_short = 0 < sum("=" not in word for word in flags.words) < 4
    if isinstance(name, str) and bare in argv and (is_short or "=" in name):
        # The flag swallowed one of the four words, or a key=value, as its NAME.
        place = argv.index(bare)
        flags = _parsed([*argv[:place], *argv[place + 1 :]])
        flags.apply_chat_template = True
    return flags


def parse(argv: list[str]) -> Request:
    """Parse the command line into a `Request`; without TASK, that of the demo. Raises UsageError."""
    flags = _parsed(argv)
    words, arguments = flags.words, {}
    if not words or "=" in words[0]:
        words, arguments = [*DEMO, *words], dict(DEMO_ARGUMENTS)
        flags.limit = DEMO_LIMIT if flags.limit is None else flags.limit
        flags.overlays = DEMO_OVERLAYS if flags.overlays is None else flags.overlays
    if len(words) < 4:
        raise UsageError(f"{('MODEL', 'METHOD', 'RATIO')[len(words) - 1]} is missing; usage: {USAGE}")
    tasks, model, methods, ratio = words[:4]
    given = arguments_of(words[4:])
    if "slots" in given:
        arguments.pop("batch_size", None)  # the demo's
    arguments |= given
    for argument, position in (("pretrained", "MODEL"), ("method", "METHOD"), ("ratio", "RATIO")):
        if argument in arguments:
            raise UsageError(f"{argument}= is set by {position}; usage: {USAGE}")
    for flag, argument in AS_ARGUMENTS.items():
        if (value := getattr(flags, flag)) is not None and value is not True:
            if argument in given:
                raise UsageError(f"{argument}= is given twice: --{flag} also sets it")
            arguments[argument] = value
    if flags.wandb_log_samples and not flags.wandb_args:
        raise UsageError("--wandb_log_samples needs --wandb_args")
    flags.overlays = flags.overlays or 0
    check_model(model)

    has_ratio, has_budget = ratio != "-", "budget" in arguments
    if (has_ratio and has_budget) or not (has_ratio or has_budget or "preset" in arguments):
        raise UsageError("give either RATIO, or '-' for RATIO and budget=ENTRIES, or a preset= that sets one")
    budgets = [_budget(item) for item in _items("budget", arguments.pop("budget"))] if has_budget else []
    ratios = [_ratio(item) for item in _items("RATIO", ratio)] if has_ratio else []
    ratios, budgets = list(dict.fromkeys(ratios)), list(dict.fromkeys(budgets))  # 0.1 and 0.10 are one
    metric, answer_filter = (str(arguments.pop(name)) if name in arguments else None for name in ("metric", "filter"))
    tasks, methods = _items("TASK", tasks), _items("METHOD", methods)
    return Request(tasks, model, methods, ratios, budgets, metric, answer_filter, arguments, flags)


def _items(name: str, text: object) -> list[str]:
    """Return the unique items of a comma-separated list. Raises UsageError if it is empty."""
    items = list(dict.fromkeys(item.strip() for item in str(text).split(",") if item.strip()))
    if not items:
        raise UsageError(f"{name} {str(text)!r} is an empty list; usage: {USAGE}")
    return items


def _ratio(text: str) -> float:
    try:
        return fraction(text)
    except argparse.ArgumentTypeError:
        meaning = "it is the fraction of the prompt's KV entries to keep"
        if NUMBER.fullmatch(text):
            raise UsageError(f"RATIO {text:.80} is not in (0, 1]: {meaning}") from None
        raise UsageError(f"RATIO {shown(text)} is not a number: {meaning}") from None


def _budget(text: str) -> int:
    try:
        return whole(1)(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"budget={error}") from None


def check_model(model: str) -> None:
    """Raise UsageError for a MODEL that cannot name a model. Whether a hub id exists is not checked."""
    local = os.path.expanduser(model)
    if model == BUNDLED_MODEL:
        return
    if os.path.isdir(local):
        config = os.path.join(local, "config.json")
        if not os.path.isfile(config):
            raise UsageError(f"MODEL {shown(model)} is a folder without config.json, so it holds no model")
        try:
            is_config = isinstance(json.loads(Path(config).read_text(encoding="utf-8")), dict)
        except (OSError, ValueError, RecursionError):  # ValueError: neither UTF-8 nor JSON
            is_config = False
        if not is_config:
            raise UsageError(f"MODEL {shown(model)}: its config.json is damaged: it holds no JSON object")
    elif os.path.isfile(local):
        raise UsageError(f"MODEL {shown(model)} is a file: give the folder of a checkpoint in transformers' format")
    elif not HUB_ID.fullmatch(model) or "--" in model or ".." in model or model.endswith(".git"):
        raise UsageError(
            f"MODEL {shown(model)} is neither a folder, nor a hub id such as org/name, nor {BUNDLED_MODEL!r}"
        )


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; every error is one line on stderr."""
    return exit_code(evaluate, argv, "cells")


if __name__ == "__main__":
    leave(main())
