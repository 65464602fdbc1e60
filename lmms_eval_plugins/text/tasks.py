"""The tasks of lm-evaluation-harness: found, checked before their data is loaded, and loaded once for all cells."""

import argparse
import contextlib
import hashlib
import io
import json
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cells.data import LIKELIHOODS, check_generation, data_error, data_identity, filter_names, working_directory
from ..cells.errors import EvaluationFailed, UsageError
from ..cells.evaluator_flags import REASONING_TAGS
from ..cells.names import LM_EVAL, check_tasks, lm_eval_folder, lm_eval_tasks

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

# Flags of the evaluation command that lm-eval has nothing for -> what they are when not given.
NOT_HERE = {
    "offset": 0,
    "repeats": 1,
    "process_with_media": False,
    "check_integrity": False,
    "write_out": False,
    "reasoning_tags": REASONING_TAGS,
}
LOUDEST = logging.ERROR  # lm-eval warns of each task that takes metadata, and of each metric without aggregation


@dataclass(frozen=True)
class TextTask:
    """A task, group or tag of lm-eval, with its data.

    Attributes:
        name: as on the command line.
        tasks: leaf tasks by name; `groups`: those among them, as lm-eval's evaluator takes them.
    """

    name: str
    tasks: dict[str, "Task"]
    groups: dict[str, "Group"]


class TextTasks:
    """Where lm-eval's tasks are found.

    Args:
        names: the tasks, as on the command line.
        metadata: what tasks that make their own prompts are told, such as `max_seq_lengths` of RULER.
    """

    def __init__(self, names: list[str], include_path: Path | None, metadata: dict[str, Any]):
        """Raises UsageError for a name that nobody knows, and where lm-eval is not installed."""
        check_tasks(names, include_path)
        self.include_path, self.metadata = include_path, metadata
        self._whole: TaskManager | None = None
        files = [lm_eval_tasks()[plain][1] for plain in map(_plain, names) if plain in lm_eval_tasks()]
        self._folders = sorted({str(_room(file)) for file in files})

    def load(self, name: str, data_root: Path | None, flags: argparse.Namespace) -> TextTask:
        """A task with its data, set up as the command line asks.

        Raises KVCompressError or UsageError for a task that is not generated, or that cannot have what is asked for;
        EvaluationFailed where its data is missing.
        """
        import numpy as np

        from kvcompress import KVCompressError

        for flag, default in NOT_HERE.items():
            if getattr(flags, flag) != default:
                raise UsageError(f"--{flag} is not for lm-eval's tasks, and {name!r} is one")
        logging.getLogger("lm_eval").setLevel(max(LOUDEST, getattr(logging, flags.verbosity, 0)))
        # Tasks that make their own prompts draw from these; lm-eval seeds them, too, before it loads.
        random.seed(flags.seed[0])
        np.random.seed(flags.seed[1])
        try:
            with working_directory(data_root), checked_first(lambda task: check_task(task, flags)), quiet():
                found = self._manager(_plain(name)).load([_plain(name)])
        except (KVCompressError, EvaluationFailed):
            raise
        except Exception as error:  # whatever a task's own code raises
            raise EvaluationFailed(data_error(name, error, data_root)) from error
        loaded = TextTask(name, found["tasks"], found.get("groups") or {})
        for task in loaded.tasks.values():
            check_task(task, flags)  # a class of its own may have loaded its data another way
            set_up(task, flags)
        return loaded

    def _manager(self, name: str) -> "TaskManager":
        """One that knows the task. Indexing all 14,000 files takes ten seconds, so first only the task's own folder."""
        from lm_eval.tasks import TaskManager

        own = [] if self.include_path is None else [str(self.include_path)]
        small = TaskManager(include_path=self._folders + own, include_defaults=False, metadata=self.metadata)
        if _is_whole(small, name):
            return small
        self._whole = self._whole or TaskManager(include_path=own, metadata=self.metadata)
        return self._whole


def _plain(name: str) -> str:
    return name.removeprefix(LM_EVAL)


def _room(file: Path) -> Path:
    """The folder of lm-eval's tasks that a task file is in, or in a folder of."""
    folder = lm_eval_folder()
    return folder / file.relative_to(folder).parts[0]


def _is_whole(manager: "TaskManager", name: str) -> bool:
    """Whether a manager knows a task, or a group with all of its parts. Of a tag that cannot be told."""
    entry = manager.task_index.get(name)
    if entry is None or entry.kind.name == "TAG":
        return False
    parts = entry.cfg["task"] if entry.kind.name == "GROUP" else []
    return all(isinstance(part, str) and _is_whole(manager, part) for part in parts)


@contextlib.contextmanager
def checked_first(check: Callable[["Task"], None]) -> Iterator[None]:
    """Inside, a task is checked when it is made and before its data is loaded."""
    from lm_eval.api.task import ConfigurableTask

    download = ConfigurableTask.download

    def checked(task: ConfigurableTask, *args: Any, **kwargs: Any) -> None:
        check(task)
        download(task, *args, **kwargs)

    ConfigurableTask.download = checked
    try:
        yield
    finally:
        ConfigurableTask.download = download


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, tasks that make their own prompts show no bars and print nothing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def check_task(task: "Task", flags: argparse.Namespace) -> None:
    """Raises KVCompressError for a task that is not generated or has an unknown generation argument, UsageError for one
    that runs the answers as programs, or shows media."""
    name, given = task.config.task, {}
    if task.OUTPUT_TYPE not in LIKELIHOODS:
        from .model import generation_kwargs

        given = generation_kwargs(task.config.generation_kwargs or {}, most=1)
    check_generation(name, task.OUTPUT_TYPE, {**given, **flags.gen_kwargs})
    if getattr(task, "UNSAFE_CODE", False):
        raise UsageError(f"task {name!r} runs the answers as programs: run it by lm-eval's own command")
    if getattr(task, "MULTIMODAL", False):
        raise UsageError(f"task {name!r} shows media: take a task of lmms-eval")


def set_up(task: "Task", flags: argparse.Namespace) -> None:
    """Give a task the examples, the arguments of `generate` and the scoring that are asked for, as lm-eval's
    `simple_evaluate` does. Raises UsageError where lm-eval would ignore it."""
    name, config, asked = task.config.task, task.config, flags.num_fewshot
    if asked and config.num_fewshot == 0:
        raise UsageError(f"--num_fewshot {asked}: the file of task {name!r} says num_fewshot: 0, which stays")
    if config.num_fewshot is None or asked is not None:
        task.set_config("num_fewshot", asked or 0)
    given = dict(flags.gen_kwargs)
    if "max_new_tokens" in given:
        given["max_gen_toks"] = given.pop("max_new_tokens")  # lm-eval's name, which tasks use
    if given:
        task.set_config("generation_kwargs", given, update=True)
    if flags.predict_only:
        task.override_metric("bypass")


def text_identity(task: "Task") -> list[str]:
    """The files of a task's data, or the digest of its questions where it makes them itself."""
    if getattr(task.eval_docs, "cache_files", None):
        return data_identity(task)
    digest = hashlib.sha256()
    for doc in task.eval_docs:
        digest.update(json.dumps(doc, default=str, sort_keys=True).encode())
    return [digest.hexdigest()[:16]]


def names_of(task: "Task") -> tuple[set[str], set[str]]:
    """A task's metrics and answer filters."""
    return set(task.aggregation()), set(filter_names(task.config.filter_list))
