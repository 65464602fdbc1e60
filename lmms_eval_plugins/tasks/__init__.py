"""The bundled tasks, and a task index that is quick to build.

`tiny_textvqa/` also works with lmms-eval's own `--include_path`; `task_manager` offers it and all tasks of lmms-eval in
this process.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvcompress import KVCompressError
from kvcompress.command_line import called

if TYPE_CHECKING:
    from lmms_eval.tasks import TaskManager

BUNDLED_TASKS = Path(__file__).parent
TASK_LINE = re.compile(r"^[\"']?task[\"']?[ \t]*:[ \t]*[\"']?([^\s\"'#]+)[\"']?[ \t]*(?:#.*)?$", re.MULTILINE)


def task_names(folder: Path) -> dict[str, Path]:
    """Return name -> file of every plain task under `folder`, by text search (parsing 1900 YAMLs takes 4 s)."""
    names = {}
    for path in folder.rglob("*.yaml"):
        for name in TASK_LINE.findall(path.read_text(encoding="utf-8-sig", errors="replace")):
            names[name] = path
    return names


@cache
def official_tasks() -> dict[str, Path]:
    """Return name -> file of every plain task of the installed lmms-eval."""
    return task_names(Path(importlib.util.find_spec("lmms_eval.tasks").origin).parent)


def task_manager(names: list[str], model_name: str | None = None) -> TaskManager:
    """Return a TaskManager that knows `names`: bundled tasks, or tasks, groups and tags of the installed lmms-eval.

    Only the folders of the named tasks are indexed, unless there is a group or tag, whose parts may lie anywhere.
    `model_name` selects model-specific prompts in the tasks that have them.

    Raises:
        KVCompressError: a name is neither bundled nor known to lmms-eval.
    """
    from lmms_eval.tasks import TaskManager

    bundled = task_names(BUNDLED_TASKS)
    plain = {**official_tasks(), **bundled}
    if all(name in plain for name in names):
        folders = sorted({str(plain[name].parent) for name in names})
        return TaskManager(include_defaults=False, include_path=folders, model_name=model_name)

    manager = TaskManager(include_path=str(BUNDLED_TASKS), model_name=model_name)
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"list them with: {called('list')} tasks"
            raise KVCompressError(
                f"unknown task {name!r}: not bundled ({', '.join(bundled)}), not in lmms-eval; {hint}"
            )
    return manager
