"""Find the tasks of lm-evaluation-harness, check them before their data loads, and load them once for all cells."""

import argparse
import contextlib
import hashlib
import io
import json
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress.errors import KVCompressError

from ..cells.data import LIKELIHOODS, check_generation, checked_first, data_error, data_identity, working_directory
from ..cells.errors import EvaluationFailed, UsageError
from ..cells.names import LM_EVAL, check_tasks, lm_eval_folder, lm_eval_tasks
from ..cells.request import REASONING_TAGS

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

# Flags of the evaluation command without a counterpart in lm-eval -> their defaults.
NOT_HERE = {
    "offset": 0,
    "repeats": 1,
    "process_with_media": False,
    "fewshot_as_multiturn": False,
    "check_integrity": False,
    "write_out": False,
    "reasoning_tags": REASONING_TAGS,
}
LOUDEST = logging.ERROR  # below, lm-eval warns of each task with metadata and each metric without aggregation


@dataclass(frozen=True)
class TextTask:
    """A task, group or tag of lm-eval, with its data.

    Attributes:
        name: the name on the command line.
        tasks: the leaf tasks by name; `groups`: the groups, as lm-eval's evaluator takes them.
    """

    name: str
    tasks: dict[str, "Task"]
    groups: dict[str, "Group"]


class TextTasks:
    """Finds and loads lm-eval's tasks.

    Args:
        names: the tasks, as on the command line.
        metadata: settings for tasks that generate their prompts, such as `max_seq_lengths` of RULER.
    """

    def __init__(self, names: list[str], include_path: Path | None, metadata: dict[str, Any]):
        """Raises UsageError for an unknown name, or if lm-eval is not installed."""
        check_tasks(names, include_path)
        self.include_path, self.metadata = include_path, metadata
        self._whole: TaskManager | None = None
        files = [lm_eval_tasks()[plain][1] for plain in map(_plain, names) if plain in lm_eval_tasks()]
        self._folders = sorted({str(_room(file)) for file in files})

    def load(self, name: str, data_root: Path | None, flags: argparse.Namespace) -> TextTask:
        """Load a task with its data and set it up as the command line asks.

        Raises KVCompressError or UsageError if its answers are not generated or it does not support what is requested;
        EvaluationFailed if its data is missing.
        """
        import numpy as np
        from lm_eval.api.task import ConfigurableTask

        for flag, default in NOT_HERE.items():
            if getattr(flags, flag) != default:
                raise UsageError(f"--{flag} does not work with lm-eval's tasks, and {name!r} is one")
        logging.getLogger("lm_eval").setLevel(max(LOUDEST, getattr(logging, flags.verbosity, 0)))
        # Tasks that generate their prompts draw from these; lm-eval also seeds them before it loads tasks.
        random.seed(flags.seed[0])
        np.random.seed(flags.seed[1])
        try:
            with (
                working_directory(data_root),
                checked_first(ConfigurableTask, lambda task: check_task(task, flags)),
                quiet(),
            ):
                found = self._manager(_plain(name)).load([_plain(name)])
        except (KVCompressError, EvaluationFailed):
            raise
        except Exception as error:  # a task's own code may raise anything
            raise EvaluationFailed(data_error(name, error, data_root)) from error
        loaded = TextTask(name, found["tasks"], found.get("groups") or {})
        for task in loaded.tasks.values():
            check_task(task, flags)  # again: a custom class may load its data without `download`
            set_up(task, flags)
        return loaded

    def _manager(self, name: str) -> "TaskManager":
        """Return a manager that knows the task. Indexing all 14,000 files takes 10 s, so try its own folder first."""
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
    """Return the top-level folder of lm-eval's tasks that contains a task file."""
    folder = lm_eval_folder()
    return folder / file.relative_to(folder).parts[0]


def _is_whole(manager: "TaskManager", name: str) -> bool:
    """Return whether a manager knows a task, or a group with all parts; False for a tag, whose parts are unknown."""
    entry = manager.task_index.get(name)
    if entry is None or entry.kind.name == "TAG":
        return False
    parts = entry.cfg["task"] if entry.kind.name == "GROUP" else []
    return all(isinstance(part, str) and _is_whole(manager, part) for part in parts)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence tasks that generate their prompts inside this context."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def check_task(task: "Task", flags: argparse.Namespace) -> None:
    """Raise KVCompressError if a task's answers are not generated or it has an unknown generation argument, UsageError
    if it executes answers as programs or shows media."""
    name, given = task.config.task, {}
    if task.OUTPUT_TYPE not in LIKELIHOODS:
        from .model import generation_kwargs

        given = generation_kwargs(task.config.generation_kwargs or {}, most=1)
    check_generation(name, task.OUTPUT_TYPE, {**given, **flags.gen_kwargs})
    if getattr(task, "UNSAFE_CODE", False):
        raise UsageError(f"task {name!r} executes answers as programs: run it with lm-eval's own command")
    if getattr(task, "MULTIMODAL", False):
        raise UsageError(f"task {name!r} shows media: use a task of lmms-eval")


def set_up(task: "Task", flags: argparse.Namespace) -> None:
    """Set a task's requested examples, arguments of `generate` and scoring, as lm-eval's `simple_evaluate` does. Raises
    UsageError if lm-eval would ignore them."""
    name, config, asked = task.config.task, task.config, flags.num_fewshot
    if asked and config.num_fewshot == 0:
        raise UsageError(f"--num_fewshot {asked}: the file of task {name!r} fixes num_fewshot: 0")
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
    """Return the files of a task's data, or a digest of its questions if it generates them."""
    if getattr(task.eval_docs, "cache_files", None):
        return data_identity(task)
    digest = hashlib.sha256()
    for doc in task.eval_docs:
        digest.update(json.dumps(doc, default=str, sort_keys=True).encode())
    return [digest.hexdigest()[:16]]
