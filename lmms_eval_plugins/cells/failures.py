"""Keep evaluating a list of tasks when one of them fails, in one process or in several."""

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

# Environment variable with a folder where ranks record why a task failed and find which tasks failed before.
FOLDER = "KVCOMPRESS_FAILED_TASKS"
FAILED = "failed.json"  # task -> reason


class TaskFailures:
    """Records why tasks of a list failed, while the others are evaluated; `raise_all` reports them at the end.

    The failure of a single task is raised at once. So is a failure in one of several ranks: a rank that went on alone
    would wait for the others forever. `run_tasks` then starts the ranks again without that task.
    """

    def __init__(self, tasks: list[str]):
        self._ends_run = len(tasks) == 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1
        self._folder = Path(os.environ[FOLDER]) if FOLDER in os.environ and len(tasks) > 1 else None
        self.reasons: dict[str, str] = read(self._folder) if self._folder else {}

    @contextlib.contextmanager
    def noted(self, task: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
        """Record and print why `task` fails in this context, if the error is of one of these kinds."""
        try:
            yield
        except kinds as error:
            if task in self.reasons:  # restarted ranks meet the failure that ended them before
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
            fail(f"{reason} (task {task} is left out, the others continue)", 1)

    def raise_all(self) -> None:
        """Raise EvaluationFailed if a task failed."""
        if self.reasons:
            which = "; ".join(f"{task} ({reason})" for task, reason in self.reasons.items())
            raise EvaluationFailed(f"{len(self.reasons)} task(s) without results: {which}")


def run_tasks(processes: int, argv: list[str]) -> int:
    """Run the evaluation command in several ranks and return the exit code. If a task of a list ends the ranks, start
    them again without it; finished cells are on disk and skipped."""
    with tempfile.TemporaryDirectory(prefix="kvcompress-failed-tasks-") as folder:
        while True:
            code = run_ranks(processes, argv, {FOLDER: folder})
            task = collect(Path(folder)) if code else None
            if task is None:
                return code
            print(f"task {task} is left out, the others continue", file=sys.stderr, flush=True)


def read(folder: Path) -> dict[str, str]:
    """Return task -> why it failed, as recorded so far."""
    file = folder / FAILED
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def leave(folder: Path, task: str, reason: str) -> None:
    """Record why this rank ends."""
    text = json.dumps({"at": time.time(), "task": task, "reason": reason})
    (folder / f"{os.getpid()}.rank").write_text(text, encoding="utf-8")


def collect(folder: Path) -> str | None:
    """Return the task that ended the ranks, or None if something else did. The earliest record counts; the other ranks
    failed because they lost the first."""
    files = list(folder.glob("*.rank"))
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file in files:
        file.unlink()
    if not records:
        return None
    first = min(records, key=lambda one: one["at"])
    (folder / FAILED).write_text(json.dumps({**read(folder), first["task"]: first["reason"]}), encoding="utf-8")
    return first["task"]


@contextlib.contextmanager
def left_out_of_a_group(cell: str, is_of_group: bool) -> Iterator[None]:
    """Skip a cell, with one line, if a method of `all` does not support a prompt. With several ranks the error ends the
    run: the others would wait for the one rank that met it."""
    try:
        yield
    except KVCompressError as error:
        is_one_of_many = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if not is_of_group or isinstance(error, DamagedFile) or is_one_of_many:
            raise
        leave_out(f"cell {cell}", error)
