"""The tasks of a run, and their data on this machine."""

import argparse
import contextlib
import errno
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress.command_line import DISK_ERRORS
from kvcompress.errors import KVCompressError, nearest, one_line, shown, unknown_name

from ..tasks import BUNDLED_TASKS
from .errors import DamagedFile, EvaluationFailed, UsageError
from .machine import HUB, is_offline
from .names import index_of, installed_tasks, lmms_eval_folder

if TYPE_CHECKING:
    from lmms_eval.api.task import Task
    from lmms_eval.tasks import TaskManager

    from kvcompress.hooks.replacement import Replacement

DEFAULT_DATA_ROOT = Path("data")
LOCAL_FORMATS = ("arrow", "csv", "imagefolder", "json", "parquet", "text")  # as `dataset_path`: local files
FULL = (errno.ENOSPC, errno.EDQUOT)  # a write names no file; others without a file, such as EPERM, may be a network's
LIKELIHOODS = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
GENERATED = ("generate_until", "generate_until_multi_round", "generate_until_agentic")  # the output types


def find_tasks(names: list[str], include_path: Path | None = None) -> "TaskManager":
    """Return lmms-eval's task manager for `names`, tasks, groups or tags of lmms-eval, bundled, or in `include_path`.
    Raises UsageError for an unknown one.

    Only the folders of the named tasks are indexed, unless there is a group or tag, whose parts may lie anywhere, or a
    folder of the user's.
    """
    from lmms_eval.tasks import TaskManager

    found = [installed_tasks().get(name, ("", None)) for name in names]
    if include_path is None and all(kind == "task" for kind, _ in found):
        return TaskManager(include_defaults=False, include_path=sorted({str(file.parent) for _, file in found}))
    own = {} if include_path is None else index_of(include_path)
    try:
        manager = TaskManager(include_path=[str(each) for each in (BUNDLED_TASKS, include_path) if each is not None])
    except Exception as error:  # lmms-eval raises anything for a bad task file
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UsageError(f"--include_path {include_path}: a task file is wrong: {reason}") from error
    for name in names:
        if name not in manager.all_tasks:
            raise UsageError(f"unknown task {name!r}{nearest(name, manager.all_tasks)}")
        # lmms-eval would silently run its own.
        is_own_task = name in own and own[name][0] == "task"
        if is_own_task and include_path not in Path(manager.task_index[name]["yaml_path"]).parents:
            raise UsageError(f"task {name!r} of --include_path has the name of another task: rename it")
    return manager


def load_tasks(
    manager: "TaskManager", name: str, data_root: Path | None, check: Callable[["Task"], None] = lambda task: None
) -> list["Task"]:
    """Load a task, or the tasks of a group, with their data. `check` is called with each task before its data loads.

    Raises EvaluationFailed if data is missing, DamagedFile if one of its files is damaged, and whatever `check` raises.
    """
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub.constants import HF_HOME
    from lmms_eval.api.task import ConfigurableTask
    from torch.utils._pytree import tree_leaves

    files: list[str] = []
    missing: list[str] = []

    def noted(task: "Task") -> None:
        # A name, or nested lists and dictionaries of names.
        leaves = tree_leaves((task.config.dataset_kwargs or {}).get("data_files"))
        named = [leaf for leaf in leaves if isinstance(leaf, str)]
        files[:] = filter(os.path.isfile, named)
        is_local = task.config.dataset_path in LOCAL_FORMATS
        missing[:] = [file for file in named if is_local and not (os.path.exists(file) or set("*:") & set(file))]
        check(task)

    os.environ.setdefault("HF_HOME", HF_HOME)  # some tasks look for their videos there and fail if it is unset
    try:
        with working_directory(data_root), one_attempt(), checked_first(ConfigurableTask, noted):
            return leaf_tasks(manager.load_task_or_group([name], "chat"))
    except (KVCompressError, EvaluationFailed):
        raise
    except Exception as error:
        if (of_disk := disk_error(error)) is not None and of_disk.filename not in files:
            raise EvaluationFailed(
                f"the data of task {name!r} cannot be unpacked into {of_disk.filename or HF_DATASETS_CACHE}: "
                f"{of_disk.strerror}; HF_HOME=FOLDER takes another folder"
            ) from error
        if files:
            reason = f"{type(error).__name__}: {one_line(error, 300)}"
            raise DamagedFile(f"the data of task {name!r} cannot be read from {', '.join(files)}: {reason}") from error
        own = own_file(manager, name)
        if own is not None and missing:
            raise DamagedFile(f"task file {own}: there is no file {shown(missing[0])}") from error
        if own is not None and not isinstance(error, OSError):  # an OSError means missing data
            raise DamagedFile(f"task file {own}: {type(error).__name__}: {one_line(error, 300)}") from error
        raise EvaluationFailed(data_error(name, error, data_root)) from error


def disk_error(error: BaseException | None) -> OSError | None:
    """Return the error of a disk behind an error, which `datasets` hides in its own; None if there is none."""
    from datasets.config import HF_DATASETS_CACHE

    cache = Path(HF_DATASETS_CACHE)
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS and (error.filename or error.errno in FULL):
            return error
        # A cache that cannot be created, as where HOME is no folder.
        if isinstance(error, OSError) and error.filename and Path(error.filename) in (cache, *cache.parents):
            return error
        error = error.__cause__ or error.__context__
    return None


def own_file(manager: "TaskManager", name: str) -> Path | None:
    """Return the file of a task of the user's; None for bundled tasks and lmms-eval's."""
    path = Path(str(manager.task_index.get(name, {}).get("yaml_path")))
    return None if any(folder in path.parents for folder in (BUNDLED_TASKS, lmms_eval_folder())) else path


def checked_first(of_harness: type["Task"], check: Callable[["Task"], None]) -> "Replacement":
    """Call `check` with each task before its data loads, which may take hours, inside this context. `of_harness`: the
    `ConfigurableTask` of lmms-eval or lm-eval."""
    from kvcompress.hooks.replacement import Replacement

    download = of_harness.download

    def checked(task: "Task", *args: Any, **kwargs: Any) -> None:
        check(task)
        download(task, *args, **kwargs)

    return Replacement(of_harness, "download", checked)


def check_task(task: "Task", flags: argparse.Namespace, slots: int | str | None = None) -> None:
    """Check a task without its data. Raises KVCompressError if its answers are not generated, it has an unknown
    generation argument, or it does not work with `slots`; EvaluationFailed if its judge has no key."""
    config = task.config
    check_generation(config.task, config.output_type, {**(config.generation_kwargs or {}), **flags.gen_kwargs}, slots)
    if not flags.predict_only:
        check_judge(task)


def check_generation(
    name: str, output_type: str, generation_kwargs: dict[str, Any], slots: int | str | None = None
) -> None:
    """Check how a task's YAML wants answers generated; a part of `check_task`."""
    from ..model.generation import NO_LIKELIHOOD, check_one_sequence, generation_of

    if output_type not in GENERATED:
        raise KVCompressError(
            f"task {name!r} has output_type {output_type}; supported are {', '.join(GENERATED)}"
            + (f"; {NO_LIKELIHOOD}" if output_type in LIKELIHOODS else "")
        )
    if slots is not None and output_type != "generate_until":
        raise KVCompressError(
            f"slots={slots!r} works only with tasks of a single round; task {name!r} has output_type {output_type}"
        )
    try:
        check_one_sequence(slots, generation_of(generation_kwargs, max_new_tokens=1).arguments)
    except KVCompressError as error:
        raise KVCompressError(f"task {name!r}: {error}") from None


def check_judge(task: "Task") -> None:
    """Raise EvaluationFailed if a judge scores the answers over the network and its key is not set."""
    from ..tasks.judges import judges_keys

    keys = judges_keys(task)
    if keys and not any(os.environ.get(name) for name in keys):
        raise EvaluationFailed(no_key(task.config.task, keys))


def no_key(name: str, keys: Iterable[str]) -> str:
    return (
        f"task {name!r} is scored by a judge whose key is not set: export {' or '.join(keys)}; with "
        "--predict_only, which only writes the answers, any value will do"
    )


def check_choice(name: str, tasks: list["Task"], metric: str | None, answer_filter: str | None) -> None:
    """Raise KVCompressError if none of the tasks has the requested metric or filter."""
    metrics = {known for task in tasks for known in task.aggregation()}
    filters = {known for task in tasks for known in filter_names(task.config.filter_list)}
    if metric is not None and metric not in metrics:
        raise unknown_name(f"task {name!r} has no metric", metric, metrics)
    if answer_filter is not None and answer_filter not in filters:
        raise unknown_name(f"task {name!r} has no filter", answer_filter, filters)


def filter_names(filter_list: list[dict[str, Any]] | None) -> list[str]:
    """Return the names of a task's answer filters, in order; lmms-eval's default is `none`."""
    return list(dict.fromkeys(entry["name"] for entry in filter_list)) if filter_list else ["none"]


def leaf_tasks(tasks: dict[Any, Any]) -> list["Task"]:
    """Flatten a task, a group, or a group of groups into a list of tasks."""
    nested = [leaf_tasks(task) if isinstance(task, dict) else [task] for task in tasks.values()]
    return [task for tasks in nested for task in tasks]


def data_identity(task: "Task") -> list[str]:
    """Return the names of the Arrow cache's files, which `datasets` derives from source paths, sizes and dates; for
    data in memory, a digest of its content."""
    if files := task.eval_docs.cache_files:
        return sorted("/".join(Path(file["filename"]).parts[-5:]) for file in files)
    digest = hashlib.sha256()
    for table in task.eval_docs.with_format("arrow").iter(100):  # undecoded
        digest.update(repr(table.to_pydict()).encode())
    return [digest.hexdigest()[:16]]


@contextlib.contextmanager
def one_attempt() -> Iterator[None]:
    """Let loading a dataset fail at the first error inside this context: lmms-eval tries up to five times and hides the
    error in a RetryError. (The hub's client retries single requests by itself.)"""
    import tenacity
    from lmms_eval.api.task import ConfigurableTask

    from kvcompress.hooks.replacement import Replacement

    retry = ConfigurableTask.download.retry
    with Replacement(retry, "stop", tenacity.stop_after_attempt(1)), Replacement(retry, "reraise", True):
        yield


def data_error(task: str, error: Exception, data_root: Path | None) -> str:
    """Say in one line what is missing and which command gets it."""
    message = one_line(error)
    if type(error).__module__.startswith("openai"):  # the task's code creates its client on import
        return no_key(task, ["OPENAI_API_KEY"])
    repository = re.search(r"['\"]([\w.-]+/[\w.-]+)['\"]", message)
    if not (is_offline() and isinstance(error, OSError)):
        return f"the data of task {task!r} could not be loaded: {type(error).__name__}: {message[:300]}"
    absent = f"the data of task {task!r} is not on this machine, and {HUB} is not reachable or HF_HUB_OFFLINE is set: "
    if repository is None:  # videos, which lmms-eval unpacks under HF_HOME
        return absent + "run the command with --limit 1 on a machine with network, and copy its HF_HOME folder here"
    name, folder = repository[1], f"{data_root or DEFAULT_DATA_ROOT}/{repository[1]}"
    return absent + (
        f"on a machine with network run `hf download {name} --repo-type dataset --local-dir {folder}`, and copy the "
        f"folder here to {folder}"
    )


@contextlib.contextmanager
def working_directory(path: Path | None) -> Iterator[None]:
    """Change the working directory: `datasets` reads a hub dataset from a folder there that has the dataset's name."""
    before = Path.cwd()
    os.chdir(path or before)
    try:
        yield
    finally:
        os.chdir(before)


def limited(questions: int, limit: float | int | None, offset: int = 0) -> int:
    """Return how many questions `--limit` and `--offset` leave, as in lmms-eval: a fraction refers to all questions."""
    most = questions if limit is None else math.ceil(questions * limit) if limit < 1 else int(limit)
    return max(0, min(questions - offset, most))
