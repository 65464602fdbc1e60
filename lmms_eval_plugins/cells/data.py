"""The tasks of a run, and their data on this machine."""

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError, nearest

if TYPE_CHECKING:
    from lmms_eval.api.task import Task
    from lmms_eval.tasks import TaskManager


from .errors import EvaluationFailed
from .machine import HUB, is_offline

DEFAULT_DATA_ROOT = Path("data")


def find_tasks(names: list[str], include_path: Path | None) -> "TaskManager":
    """lmms-eval's task manager with all of `names`. Raises KVCompressError or UsageError for an unknown one."""
    from ..tasks import BUNDLED_TASKS, task_manager, task_names

    if include_path is None:
        return task_manager(names)
    from lmms_eval.tasks import TaskManager

    try:
        manager = TaskManager(include_path=[str(BUNDLED_TASKS), str(include_path)])
    except Exception as error:  # of a task file, in lmms-eval's own words
        message = " ".join(str(error).split())
        raise UsageError(
            f"--include_path {include_path}: a task file is wrong: {type(error).__name__}: {message}"
        ) from error
    for name in names:
        if name not in manager.all_tasks:
            raise UsageError(f"unknown task {name!r}{nearest(name, manager.all_tasks)}")
        # lmms-eval would run its own without a word.
        if name in task_names(include_path) and include_path not in Path(manager.task_index[name]["yaml_path"]).parents:
            raise UsageError(f"task {name!r} of --include_path has the name of another task: rename it")
    return manager


def load_tasks(manager: "TaskManager", name: str, data_root: Path | None) -> list["Task"]:
    """The task, or the tasks of the group, with their data. Raises EvaluationFailed where data is missing."""
    try:
        with working_directory(data_root), one_attempt():
            return leaf_tasks(manager.load_task_or_group([name], "chat"))
    except Exception as error:
        raise EvaluationFailed(data_error(name, error, data_root)) from error


def leaf_tasks(tasks: dict[Any, Any]) -> list["Task"]:
    """The tasks of a task, a group, or a group of groups."""
    nested = [leaf_tasks(task) if isinstance(task, dict) else [task] for task in tasks.values()]
    return [task for tasks in nested for task in tasks]


def data_identity(task: "Task") -> list[str]:
    """The Arrow cache's files: `datasets` derives their names from the source files' paths, sizes and dates."""
    return sorted("/".join(Path(file["filename"]).parts[-5:]) for file in task.eval_docs.cache_files)


@contextlib.contextmanager
def one_attempt() -> Iterator[None]:
    """lmms-eval loads a dataset up to five times and then hides the error in a RetryError; here the first one counts.
    (The hub's client repeats single requests by itself.)"""
    import tenacity
    from lmms_eval.api.task import ConfigurableTask

    retry = ConfigurableTask.download.retry
    saved, retry.stop, retry.reraise = (retry.stop, retry.reraise), tenacity.stop_after_attempt(1), True
    try:
        yield
    finally:
        retry.stop, retry.reraise = saved


def data_error(task: str, error: Exception, data_root: Path | None) -> str:
    """One line: what is missing, and the command that brings it."""
    message = " ".join(str(error).split())
    repository = re.search(r"['\"]([\w.-]+/[\w.-]+)['\"]", message)
    if not (is_offline() and isinstance(error, OSError)):
        return f"the data of task {task!r} could not be loaded: {type(error).__name__}: {message[:300]}"
    absent = f"the data of task {task!r} is not on this machine, and {HUB} is not reachable or HF_HUB_OFFLINE is set: "
    if repository is None:  # videos, which lmms-eval unpacks under HF_HOME
        return absent + "run the command once with --limit 1 where there is network, and copy its HF_HOME folder here"
    name, folder = repository[1], f"{data_root or DEFAULT_DATA_ROOT}/{repository[1]}"
    return absent + (
        f"where there is network run `hf download {name} --repo-type dataset --local-dir {folder}`, and copy the "
        f"folder here to {folder}"
    )


@contextlib.contextmanager
def working_directory(path: Path | None) -> Iterator[None]:
    """`datasets` takes a folder of the working directory that is named like a hub dataset for that dataset."""
    before = Path.cwd()
    os.chdir(path or before)
    try:
        yield
    finally:
        os.chdir(before)


def limited(questions: int, limit: float | int | None, offset: int = 0) -> int:
    """How many questions `--limit` and `--offset` leave, as lmms-eval counts: a fraction is one of all questions."""
    most = questions if limit is None else math.ceil(questions * limit) if limit < 1 else int(limit)
    return max(0, min(questions - offset, most))
