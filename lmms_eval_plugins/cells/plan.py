"""From a checked command line to the cells that it asks for, each with its folder."""

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command_line import DEFAULT_SEEDS, Request
from .errors import UsageError, nearest
from .identity import fingerprint
from .results import Cell, incomplete_reason

if TYPE_CHECKING:
    from lmms_eval.tasks import TaskManager

    from ..model.arguments import ModelArguments

from .data import data_identity, find_tasks, limited, load_tasks


@dataclass(frozen=True)
class Job:
    """A cell, all options of its method, what its numbers depend on (see `fingerprint`), and how long it is."""

    cell: Cell
    options: dict[str, Any]
    folder: Path
    fingerprint: dict[str, Any]
    questions: int

    @property
    def name(self) -> str:
        """`snapkv-0.2-window_size=8`: the cell without its task, model and settings of the run."""
        return replace(self.cell, settings={}).folder(Path()).name

    @property
    def todo(self) -> str | None:
        """Why this cell has to be computed; None where its results are complete."""
        return incomplete_reason(self.folder, self.fingerprint)


# -- methods, options and model arguments


def check_arguments(request: Request) -> tuple["ModelArguments", list[tuple[Cell, dict[str, Any]]]]:
    """The checked model arguments, and every cell with all options of its method.

    Raises KVCompressError or UsageError for an unknown method, option or model argument, or a wrong value of one.
    """
    from kvcompress import KVCompressError, list_methods
    from kvcompress.methods import method_info
    from kvcompress.policy.options import all_options
    from kvcompress.policy.policy import check_tensor_parallel, make_policy

    from ..model.arguments import LEGACY_ARGUMENTS, TINY_MODEL, ModelArguments, parse_arguments

    methods = list({method_info(name).name: method_info(name) for name in request.methods}.values())
    scorer = request.arguments.get("scorer")
    options = {name for info in methods for name in all_options(info, scorer)}
    own = {name: value for name, value in request.arguments.items() if name not in options}
    for name in own:
        if name in ModelArguments.model_fields or name in LEGACY_ARGUMENTS:
            continue
        asked = ", ".join(info.name for info in methods)
        owners = ", ".join(info.name for info in list_methods().values() if name in all_options(info))
        if owners:
            raise KVCompressError(f"{name!r} is an option of {owners}, not of {asked}")
        valid = sorted({*ModelArguments.model_fields, "budget", *options} - {"legacy", "pretrained"})
        raise KVCompressError(f"unknown argument {name!r}{nearest(name, valid)} for {asked}; valid: {', '.join(valid)}")
    model = request.model if request.model == TINY_MODEL else local_or_hub(request.model)
    for name in {"chat_template", "system_prompt"} & own.keys():  # text, or a file of the present working directory
        own[name] = str(Path(own[name]).resolve()) if Path(str(own[name])).is_file() else own[name]
    arguments, _ = parse_arguments(pretrained=model, **own)

    settings = run_settings(arguments, request.flags)
    cells = []
    for task in request.tasks:
        for info in methods:
            defaults = all_options(info, scorer)
            given = {name: value for name, value in request.arguments.items() if name in defaults}
            policy = make_policy(info.name, 1.0, **given)
            if arguments.tp_plan is not None:
                check_tensor_parallel(policy)
            in_force = policy.options
            changed = {name: value for name, value in in_force.items() if value != defaults[name]}
            sizes = [{"ratio": ratio} for ratio in request.ratios] + [{"budget": size} for size in request.budgets]
            for size in [{"ratio": 1.0}] if info.name == "full" else sizes:
                cells.append((Cell(task, model, info.name, **size, options=changed, settings=settings), in_force))
    return arguments, cells


def local_or_hub(model: str) -> str:
    """The absolute path of a local folder; a hub id as it is. Raises UsageError for anything else."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"MODEL {model!r} is a folder without config.json, so not a model")
        return str(path.resolve())
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise UsageError(f"MODEL {model!r} is neither a folder, nor a hub id such as org/name, nor 'tiny'")
    return model


# Arguments that change neither a score nor a time.
HARMLESS = {"pretrained", "measurements_path", "vision_cache_gb", "prompt_cache_gb"}


def run_settings(arguments: "ModelArguments", flags: argparse.Namespace) -> dict[str, Any]:
    """The settings of a run that differ from the defaults and may change a score or a time."""
    settings = arguments.model_dump(mode="json", exclude_defaults=True, exclude=HARMLESS)
    if flags.seed != DEFAULT_SEEDS:
        settings["seed"] = ",".join(str(seed) for seed in flags.seed)
    if flags.data_root is not None:
        settings["data"] = flags.data_root.name
    for name in ("limit", "gen_kwargs", "num_fewshot", "predict_only"):
        if value := getattr(flags, name):
            settings[name] = value
    return settings


# -- one cell


def find_jobs(
    request: Request,
    arguments: "ModelArguments",
    cells: list[tuple[Cell, dict[str, Any]]],
    data_root: Path | None,
) -> tuple["TaskManager", list[Job]]:
    """The tasks with their data, and a job for every cell of `check_arguments`.

    Raises KVCompressError or UsageError for an unknown task, EvaluationFailed where data is missing.
    """
    flags, output = request.flags, request.flags.output_path.resolve()
    manager, data, questions = find_tasks(request.tasks, flags.include_path), {}, {}
    for name in request.tasks:
        tasks = load_tasks(manager, name, data_root)
        if len(tasks) > 1 and isinstance(flags.limit, float):
            # lmms-eval turns the fraction into a number on the first task and uses that for the others.
            raise UsageError(f"--limit {flags.limit:g}: {name!r} is a group, which needs a number of questions")
        data[name] = {task.config.task: data_identity(task) for task in tasks}
        questions[name] = sum(limited(len(task.eval_docs), flags.limit) for task in tasks)
    jobs = [
        Job(
            cell,
            options,
            cell.folder(output),
            fingerprint(cell, arguments, options, data[cell.task]),
            questions[cell.task],
        )
        for cell, options in cells
    ]
    return manager, jobs
