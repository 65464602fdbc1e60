"""Turn a command line into cells, and cells into jobs: each cell with its task and its folder."""

import argparse
import os
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress.files import check_output

from ..text.run import applies_template
from ..text.tasks import TextTask, TextTasks, text_identity
from .data import DEFAULT_DATA_ROOT, check_choice, check_task, data_identity, find_tasks, limited, load_tasks
from .errors import UsageError, leave_out
from .identity import fingerprint, task_identity
from .inspection import check_integrity, set_examples, write_out
from .kept_answers import KeptAnswers, read_kept_answers
from .kept_tokens_file import kept_tokens_damage, overlays_asked
from .machine import check_device, check_model_is_local, is_offline, rank
from .names import able, asked_for, canonical, is_lm_eval
from .request import BUNDLED_MODEL, DEFAULT_SEEDS, REASONING_TAGS, Request
from .results import Cell, incomplete_reason

if TYPE_CHECKING:
    from lmms_eval.tasks import TaskManager

    from ..model.arguments import ModelArguments
    from .served import Server

MOST_DRAWS = 1000
# Switches that change answers or scores.
CHANGE_ANSWERS = ("fewshot_as_multiturn", "process_with_media")
# Arguments that change neither scores nor times.
HARMLESS = {"pretrained", "measurements_path", "vision_cache_gb", "prompt_cache_gb"}


@dataclass(frozen=True)
class Plan:
    """The cells of a command line, checked as far as possible without data or model.

    Attributes:
        arguments: the model's arguments.
        cells: every cell with all options of its method.
        settings: the run's settings that differ from their defaults and may change a score or a time.
        data_root: the folder of datasets: the given one, or `data` if it exists.
        of_groups: methods requested by a group such as `all`; they are left out if they do not support a prompt.
        left_out: methods requested by name that lack a file -> the line that says so.
        server: what answers, if not a model here.
    """

    request: Request
    arguments: "ModelArguments"
    cells: list[tuple[Cell, dict[str, Any]]]
    settings: dict[str, Any]
    data_root: Path | None
    of_groups: frozenset[str] = frozenset()
    left_out: dict[str, str] = field(default_factory=dict)
    server: "Server | None" = None

    @classmethod
    def of(cls, request: Request, leaves_out: bool = False) -> "Plan":
        """Build the plan of a request.

        Raises KVCompressError or UsageError for an unknown method, option or model argument, or a wrong value; also for
        a method that lacks a file, unless the others shall run without it (`leaves_out`). Methods of a group such as
        `all` that cannot run here are left out, each with one line.
        """
        from ..model.arguments import model_arguments, split_arguments, without_none
        from ..model.generation import check_generation, check_one_sequence

        tasks = [canonical(name, request.flags.include_path) for name in request.tasks]
        request = replace(request, tasks=list(dict.fromkeys(tasks)))
        asked = asked_for(request.methods)
        own, options = split_arguments(request.arguments, list(asked), ("budget", "metric", "filter"))
        for name in {"chat_template", "system_prompt"} & own.keys():  # text, or a file in the working directory
            own[name] = os.path.realpath(own[name]) if os.path.isfile(str(own[name])) else own[name]
        request.flags.gen_kwargs = check_generation(request.flags.gen_kwargs)
        arguments = model_arguments(pretrained=_local_or_hub(request.model), **own)
        check_one_sequence(arguments.slots, request.flags.gen_kwargs)
        settings = _run_settings(arguments, request.flags)
        options = without_none(options)
        draws = draws_of(options)
        methods, left_out, unable = able(asked, lambda method: _draws(method, request, arguments, draws), leaves_out)
        for method, reason in unable.items():
            leave_out(f"method {method}", reason)
        request = replace(request, methods=list(methods))
        data_root = request.flags.data_root or (DEFAULT_DATA_ROOT if DEFAULT_DATA_ROOT.is_dir() else None)
        cells, server = _cells(request, methods, settings, text_settings(arguments, request.flags)), None
        if request.flags.server is not None:
            from .served import SLOTS, server_of

            arguments = arguments.model_copy(update={"slots": arguments.slots or SLOTS})
            server = server_of(request, arguments, cells)
            cells = server.named(cells)
        of_groups = frozenset(method for method, by_name in asked.items() if not by_name)
        return cls(request, arguments, cells, settings, data_root, of_groups, left_out, server)

    def check_machine(self, processes: int) -> None:
        """Raise EvaluationFailed if this machine lacks a required GPU, or the model and the network to get it."""
        if self.server is not None:
            return
        check_device(self.arguments.device, processes)
        if is_offline():
            check_model_is_local(self.arguments)

    @cached_property
    def managers(self) -> tuple["TaskManager | None", TextTasks | None]:
        """The task managers of lmms-eval and lm-eval; None where none of its tasks is requested. Raises KVCompressError
        or UsageError for an unknown task, or if a task needs lm-eval and it is not installed."""
        include_path = self.request.flags.include_path
        text = [name for name in self.request.tasks if self.is_text(name)]
        others = [name for name in self.request.tasks if name not in text]
        metadata = {"pretrained": self.arguments.pretrained, **self.request.flags.metadata}
        of_text = TextTasks(text, include_path, metadata) if text else None
        return find_tasks(others, include_path) if others else None, of_text

    def jobs(self) -> list["Job"]:
        """Load the tasks' data and return a job for every cell. Raises like `managers` and `jobs_of`."""
        return [job for name in self.request.tasks for job in self.jobs_of(name)]

    def jobs_of(self, name: str) -> list["Job"]:
        """Load a task's data and return a job for each of its cells.

        Raises KVCompressError or UsageError if the task's answers are not generated or it lacks what is requested;
        EvaluationFailed if its data or its judge's key is missing.
        """
        flags, is_text, (of_lmms_eval, of_text) = self.request.flags, self.is_text(name), self.managers
        if is_text:
            asked, identity = of_text.load(name, self.data_root, flags), text_identity
            leaves = asked.tasks
        else:
            asked, identity, slots = of_lmms_eval, data_identity, self.arguments.slots
            tasks = load_tasks(asked, name, self.data_root, lambda task: check_task(task, flags, slots))
            if len(tasks) > 1 and isinstance(flags.limit, float):
                # lmms-eval turns the fraction into a number for the first task and uses that for the others.
                raise UsageError(f"--limit {flags.limit:g}: {name!r} is a group, which needs a number of questions")
            for task in tasks:
                set_examples(task, flags)
            leaves = {task.config.task: task for task in tasks}
        check_choice(name, list(leaves.values()), self.request.metric, self.request.filter)
        data = {leaf: identity(task) for leaf, task in leaves.items()}
        definitions = {leaf: task_identity(task) for leaf, task in leaves.items()}
        counts = {leaf: limited(len(task.eval_docs), flags.limit, flags.offset) for leaf, task in leaves.items()}
        if empty := [leaf for leaf, count in counts.items() if not count]:
            raise UsageError(f"--offset {flags.offset} leaves no question of {empty[0]!r}")
        if rank() == 0 and not is_text and (flags.check_integrity or flags.include_path is not None):
            # For a user's own task, the first question shows whether its file and its data match.
            check_integrity(tasks, flags, self.data_root, most=None if flags.check_integrity else 1)
        if flags.write_out and rank() == 0:
            write_out(tasks, flags, self.data_root, self.arguments)
        root, questions = flags.output_path.resolve(), sum(counts.values())
        return [
            Job(
                cell,
                options,
                cell.folder(root),
                fingerprint(cell, self.arguments, options, data, definitions, self.server and self.server.about),
                questions,
                asked,
                self,
            )
            for cell, options in self.cells
            if cell.task == name
        ]

    @property
    def needs_template(self) -> bool:
        """Whether the model needs a chat template, as all of lmms-eval's tasks do: they are conversations."""
        return not all(map(self.is_text, self.request.tasks)) or applies_template(self.arguments, self.request.flags)

    def is_text(self, name: str) -> bool:
        """Return whether lm-evaluation-harness asks and scores a task."""
        return is_lm_eval(name, self.request.flags.include_path)


@dataclass(frozen=True)
class Job:
    """A cell to evaluate.

    Attributes:
        options: all options of the method.
        folder: where the results are or will be.
        fingerprint: everything the numbers depend on.
        questions: the number of questions.
        asked: the cell's task of lm-eval, or lmms-eval's manager, which knows the cell's task.
        plan: the plan that the cell belongs to.
    """

    cell: Cell
    options: dict[str, Any]
    folder: Path
    fingerprint: dict[str, Any]
    questions: int
    asked: "TaskManager | TextTask"
    plan: Plan

    @property
    def name(self) -> str:
        """The cell without its task, model and settings of the run, such as `snapkv-0.2-window_size=8`."""
        return replace(self.cell, settings={}).folder(Path()).name

    @property
    def incomplete(self) -> str | None:
        """Why the folder does not hold the cell's results; None if it does."""
        return incomplete_reason(self.folder, self.fingerprint) or kept_tokens_damage(self.folder)

    @property
    def todo(self) -> str | None:
        """Why the cell must be computed; None if everything requested is on disk."""
        flags, reason = self.plan.request.flags, self.incomplete
        if flags.force or reason:
            return reason or "--force"
        return "--overlays" if overlays_asked(self.folder) < flags.overlays else None

    @property
    def kept_answers(self) -> KeptAnswers | None:
        """The unscored answers of an earlier run; None if the model has to answer."""
        flags = self.plan.request.flags
        answers = None if flags.force else read_kept_answers(self.folder, self.fingerprint, flags.overlays)
        return answers if answers is not None and answers.questions == self.questions else None


def check_folders(jobs: list[Job]) -> None:
    """Raise KVCompressError or UsageError if the results or measurements of jobs cannot be written."""
    for job in jobs:
        if job.folder.exists() and not job.folder.is_dir():
            raise UsageError(f"{str(job.folder)!r} is a file but must be a folder for results: remove it")
    answers = {job.plan.request.flags.use_cache for job in jobs} - {None}
    for folder in {job.folder.parent for job in jobs} | answers:
        check_output(folder)
    for path in {job.plan.arguments.measurements_path for job in jobs} - {None}:
        check_output(path.parent, path.name)


def _local_or_hub(model: str) -> str:
    """Return the absolute path of a local folder; a hub id, or `tiny`, unchanged."""
    path = Path(os.path.expanduser(model))
    return str(path.resolve()) if model != BUNDLED_MODEL and path.is_dir() else model


def _run_settings(arguments: "ModelArguments", flags: argparse.Namespace) -> dict[str, Any]:
    harmless = HARMLESS if flags.server is None else {*HARMLESS, "slots"}  # a server's times are not measured
    settings = arguments.model_dump(mode="json", exclude_defaults=True, exclude=harmless)
    if flags.seed != DEFAULT_SEEDS:
        settings["seed"] = ",".join(str(seed) for seed in flags.seed)
    if flags.data_root is not None:
        settings["data"] = flags.data_root.name if flags.data_root.parent == Path.cwd() else str(flags.data_root)
    for name in ("limit", "offset", "gen_kwargs", "num_fewshot", "predict_only", *CHANGE_ANSWERS):
        value = getattr(flags, name)
        if value or (name == "num_fewshot" and value is not None):  # 0 overrides the task's own number
            settings[name] = value
    if flags.repeats > 1:
        settings["repeats"] = flags.repeats
    if flags.reasoning_tags != REASONING_TAGS:
        settings["reasoning_tags"] = flags.reasoning_tags
    return settings


def text_settings(arguments: "ModelArguments", flags: argparse.Namespace) -> dict[str, Any]:
    """Return the run's settings that affect only lm-eval's tasks."""
    settings = {"metadata": flags.metadata} if flags.metadata else {}
    if arguments.chat_template is None and applies_template(arguments, flags):
        settings["apply_chat_template"] = True
    return settings


def draws_of(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each draw: `seed=0..9` means ten of them. Raises UsageError."""
    seeds = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", str(options.get("seed")))
    if seeds is None:
        return [options]
    first, last = map(int, seeds.groups())
    if not 0 <= last - first < MOST_DRAWS:
        raise UsageError(f"seed={options['seed']} is not a range of 1 to {MOST_DRAWS} seeds, such as 0..9")
    return [{**options, "seed": seed} for seed in range(first, last + 1)]


# Options, those that differ from their defaults, and the sizes as arguments of `Cell`.
Draw = tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]


def _draws(method: str, request: Request, arguments: "ModelArguments", draws: list[dict[str, Any]]) -> list[Draw]:
    """Return the draws of a method, with those of the options that it has; a method without a seed has one draw.

    `full`, `blind`, and a method whose preset sets the size, have a single size. Raises KVCompressError if the method
    cannot run with these options and arguments.
    """
    from kvcompress.policy.conflicts import TENSOR_PARALLEL, check_conflicts

    from ..model.arguments import check_options
    from ..model.input_methods import choose, method_options, size_of

    defaults, own_size, found = method_options(method, draws[0].get("scorer")), size_of(method), []
    sizes = [{"ratio": ratio} for ratio in request.ratios] + [{"budget": size} for size in request.budgets]
    for options in draws if "seed" in defaults else draws[:1]:
        own = {name: value for name, value in options.items() if name in defaults}
        chosen = choose(method, 1.0 if sizes and not own_size else None, None, own)
        if arguments.tp_plan is not None:
            check_conflicts(chosen.policy, TENSOR_PARALLEL)
        check_options(arguments, chosen.effective)
        changed = {name: value for name, value in chosen.effective.items() if value != defaults[name]}
        of_preset = chosen.policy.budget
        of_method = [own_size] if own_size else sizes or [{"ratio": of_preset.ratio, "budget": of_preset.entries}]
        found.append((chosen.effective, changed, of_method))
    return found


def _cells(
    request: Request, methods: dict[str, list[Draw]], settings: dict[str, Any], of_text: dict[str, Any]
) -> list[tuple[Cell, dict[str, Any]]]:
    """Return the cells, tasks x methods x sizes, with all their options; `of_text`: further settings of lm-eval's
    tasks."""
    own = {task: of_text if is_lm_eval(task, request.flags.include_path) else {} for task in request.tasks}
    return [
        (Cell(task, request.model, method, **size, options=changed, settings={**settings, **own[task]}), options)
        for task in request.tasks
        for method, draws in methods.items()
        for options, changed, sizes in draws
        for size in sizes
    ]
