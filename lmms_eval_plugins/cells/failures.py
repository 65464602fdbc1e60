"""Tasks of a list that fail: the others are evaluated all the same, in one process or in several."""

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from kvcompress.command_line import fail
from kvcompress.errors import KVCompressError

from .errors import DamagedFile, EvaluationFailed, leave_out
from .processes import run_ranks

# Environment variable of ranks: a folder where a rank leaves why a task fails, and finds which did before.
FOLDER = "KVCOMPRESS_FAILED_TASKS"
FAILED = "failed.json"  # task -> reason


class TaskFailures:
    """What keeps tasks of a list from being evaluated. The others are evaluated all the same; at the end `raise_all`.

    A single task's failure is raised. So is one in a rank: ranks wait for each other, and one that went on alone would
    wait for ever. Whoever started the ranks then starts them again, without that task: `run_tasks`.
    """

    def __init__(self, tasks: list[str]):
        self._ends_run = len(tasks) == 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1
        self._folder = Path(os.environ[FOLDER]) if FOLDER in os.environ and len(tasks) > 1 else None
        self.reasons: dict[str, str] = read(self._folder) if self._folder else {}

    @contextlib.contextmanager
    def noted(self, task: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
        """Note and print why `task` fails inside, with an error of these kinds."""
        try:
            yield
        except kinds as error:
            if task in self.reasons:  # ranks that were started again find what ended them before
                return
            is_known = isinstance(error, EvaluationFailed | DamagedFile) or type(error).__name__ == "KVCompressError"
            reason = str(error) if is_known else f"{type(error).__name__}: {error}"
            if self._ends_run:
                if self._folder:
                    leave(self._folder, task, reason)
                raise
            if not is_known:
                traceback.print_exc()
            self.reasons[task] = reason
            fail(f"{reason} (task {task} is left out, the others go on)", 1)

    def raise_all(self) -> None:
        """Raises EvaluationFailed where a task failed."""
        if self.reasons:
            which = "; ".join(f"{task} ({reason})" for task, reason in self.reasons.items())
            raise EvaluationFailed(f"{len(self.reasons)} task(s) without results: {which}")


def run_tasks(processes: int, argv: list[str]) -> int:
    """The evaluation command in so many ranks; the exit code. Where a task of a list ends them they are started again,
    without it: each time one task fewer. What was finished is on disk, and skipped."""
    with tempfile.TemporaryDirectory(prefix="kvcompress-failed-tasks-") as folder:
        while True:
            code = run_ranks(processes, argv, {FOLDER: folder})
            task = collect(Path(folder)) if code else None
            if task is None:
                return code
            print(f"task {task} is left out, the others go on", file=sys.stderr, flush=True)


def read(folder: Path) -> dict[str, str]:
    """task -> why it failed, of all ranks that have ended."""
    file = folder / FAILED
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def leave(folder: Path, task: str, reason: str) -> None:
    """Let a rank say why it ends."""
    text = json.dumps({"at": time.time(), "task": task, "reason": reason})
    (folder / f"{os.getpid()}.rank").write_text(text, encoding="utf-8")


def collect(folder: Path) -> str | None:
    """The task that ended the ranks; None where it was something else. What other ranks say, later, is that they lost
    the first."""
    files = list(folder.glob("*.rank"))
    said = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file in files:
        file.unlink()
    if not said:
        return None
    first = min(said, key=lambda one: one["at"])
    (folder / FAILED).write_text(json.dumps({**read(folder), first["task"]: first["reason"]}), encoding="utf-8")
    return first["task"]


@contextlib.contextmanager
def left_out_of_a_group(cell: str, is_of_group: bool) -> Iterator[None]:
    """A prompt that a method of `all` cannot be given costs its cell alone, and a line. Of several ranks one may be the
    only one to meet it, and the others would wait for it: there it ends the run."""
    try:
        yield
    except KVCompressError as error:
        is_one_of_many = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if not is_of_group or isinstance(error, DamagedFile) or is_one_of_many:
            raise
        leave_out(f"cell {cell}", error)
