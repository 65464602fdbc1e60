"""Run the tasks of a list, in one process or in several that end with this one, and go on when a task fails."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvcompress.command_line import TIDY_S, fail
from kvcompress.errors import KVCompressError

from .errors import DamagedFile, EvaluationFailed, leave_out

COMMAND = [sys.executable, "-m", "lmms_eval_plugins.evaluate"]
POLL_S = 0.1
GRACE_S = 1.0  # processes that fail within this time fail for the same reason

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
STARTED_BY = "KVCOMPRESS_STARTED_BY"  # environment variable with the id of the process that started this one

# Environment variable with a folder where ranks record why a task failed, or a cell of `all` is left out, and find
# which did before.
FOLDER = "KVCOMPRESS_FAILED_TASKS"
FAILED = "failed.json"  # task, or task/cell -> reason


class TaskFailures:
    """Records why tasks of a list failed, while the others are evaluated; `raise_all` reports them at the end.

    The failure of a single task is raised at once, unless a cell of it is complete: then the cell is at fault, and the
    task's others continue. A failure in one of several ranks is always raised: a rank that went on alone would wait for
    the others forever. `run_tasks` then starts the ranks again without that task.

    Attributes:
        reasons: task -> why it failed.
        cells: name of a cell -> why it alone failed.
        left_out: cells of `all` that ended the ranks before, as `task/cell`.
        working: the tasks of which a cell is complete.
    """

    def __init__(self, tasks: list[str]):
        self._is_one_of_many = int(os.environ.get("WORLD_SIZE", 1)) > 1
        self._ends_run = len(tasks) == 1 or self._is_one_of_many
        known = failed_tasks(Path(os.environ[FOLDER])) if FOLDER in os.environ else {}
        self._folder = Path(os.environ[FOLDER]) if FOLDER in os.environ and len(tasks) > 1 else None
        self.reasons: dict[str, str] = {task: known[task] for task in tasks if task in known}
        self.left_out = known.keys() - self.reasons.keys()
        self.cells: dict[str, str] = {}
        self.working: set[str] = set()

    @contextmanager
    def noted(
        self, task: str, kinds: tuple[type[Exception], ...] = (Exception,), cell: str | None = None
    ) -> Iterator[None]:
        """Record and print why `task`, or its `cell`, fails in this context, if the error is of one of these kinds."""
        try:
            yield
        except kinds as error:
            if task in self.reasons:  # restarted ranks meet the failure that ended them before
                return
            is_known = isinstance(error, EvaluationFailed | DamagedFile | KVCompressError)
            reason = str(error) if is_known else f"{type(error).__name__}: {error}"
            is_of_all = isinstance(error, OSError | EvaluationFailed | DamagedFile)  # files and scorers are shared
            is_of_cell = cell and task in self.working and not is_of_all and not self._is_one_of_many
            if self._ends_run and not is_of_cell:
                if self._folder:
                    leave(self._folder, task, reason)
                raise
            if not is_known:
                traceback.print_exc()
            kind, name, failed = ("cell", cell, self.cells) if is_of_cell else ("task", task, self.reasons)
            failed[name] = reason
            fail(f"{reason} ({kind} {name} is left out, the others continue)", 1)

    def raise_all(self) -> None:
        """Raise EvaluationFailed if a task or cell failed."""
        parts = [
            f"{len(failed)} {kind}(s) without results: {'; '.join(f'{name} ({why})' for name, why in failed.items())}"
            for kind, failed in (("task", self.reasons), ("cell", self.cells))
            if failed
        ]
        if parts:
            raise EvaluationFailed("; ".join(parts))


def run_tasks(processes: int, argv: list[str]) -> int:
    """Run the evaluation command in several ranks and return the exit code. If a task of a list or a cell of `all`
    ends the ranks, start them again without it; finished cells are on disk and skipped."""
    with tempfile.TemporaryDirectory(prefix="kvcompress-failed-tasks-") as folder:
        while True:
            code = run_ranks(processes, argv, {FOLDER: folder})
            name = collect(Path(folder)) if code else None
            if name is None:
                return code
            kind = "cell" if "/" in name else "task"
            print(f"{kind} {name} is left out, the others continue", file=sys.stderr, flush=True)


def failed_tasks(folder: Path) -> dict[str, str]:
    """Return task, or task/cell -> why it failed, as recorded so far."""
    file = folder / FAILED
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def leave(folder: Path, name: str, reason: str) -> None:
    """Record why this rank ends: for a task or a task/cell. What is recorded first counts."""
    with suppress(FileExistsError), open(folder / f"{os.getpid()}.rank", "x", encoding="utf-8") as file:
        file.write(json.dumps({"at": time.time(), "name": name, "reason": reason}))


def collect(folder: Path) -> str | None:
    """Return the task or task/cell that ended the ranks, or None if something else did. The earliest record counts;
    the other ranks failed because they lost the first."""
    files = list(folder.glob("*.rank"))
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file in files:
        file.unlink()
    if not records:
        return None
    first = min(records, key=lambda one: one["at"])
    (folder / FAILED).write_text(json.dumps({**failed_tasks(folder), first["name"]: first["reason"]}), encoding="utf-8")
    return first["name"]


@contextmanager
def left_out_of_a_group(task: str, cell: str, is_of_group: bool) -> Iterator[None]:
    """Skip a cell, with one line, if a method of `all` does not support a prompt. Several ranks all end, since the
    others would wait for the one that met it, and `run_tasks` starts them again without the cell."""
    try:
        yield
    except KVCompressError as error:
        is_one_of_many = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if not is_of_group or isinstance(error, DamagedFile):
            raise
        if is_one_of_many:
            if FOLDER in os.environ:
                leave(Path(os.environ[FOLDER]), f"{task}/{cell}", str(error))
            raise
        leave_out(f"cell {cell}", error)


@contextmanager
def evaluation(argv: list[str], **settings: Any) -> Iterator[subprocess.Popen]:
    """Run the evaluation command in a child process that ends at the latest with the block. `settings` go to Popen."""
    process = start(argv, **settings)
    try:
        yield process
    finally:
        stop([process])


def start(argv: list[str], **settings: Any) -> subprocess.Popen:
    """Start the command in its own session: Ctrl-C reaches only this process, which stops the others. On Linux the
    command ends with this process (`end_with_parent`), also if that is killed and stops nothing."""
    environment = {**(settings.pop("env", None) or os.environ), STARTED_BY: str(os.getpid())}
    return subprocess.Popen([*COMMAND, *argv], start_new_session=True, env=environment, **settings)


def end_with_parent() -> None:
    """Have Linux end this process with the one that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.pop(STARTED_BY, None) not in (None, str(os.getppid())):
            os.kill(os.getpid(), signal.SIGTERM)  # it was gone before Linux was asked


def stop(processes: list[subprocess.Popen]) -> None:
    """Stop running processes with SIGTERM, so that they clean up, and with SIGKILL if that takes too long."""
    running = [process for process in processes if process.poll() is None]
    try:
        for process in running:
            process.terminate()
        end = time.monotonic() + TIDY_S
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0))
    finally:  # also after a second Ctrl-C
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_ranks(processes: int, argv: list[str], variables: dict[str, str] | None = None) -> int:
    """Run the evaluation command in several ranks on this machine; return 0 or the exit code of the first to fail.

    The output of rank 0 is shown; the errors of another rank only if it fails. `variables`: added to the environment.
    """
    shared = {**(variables or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # otherwise each would use all cores
    ranks: list[subprocess.Popen] = []
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        logs = [None, *(stack.enter_context(tempfile.TemporaryFile()) for _ in range(processes - 1))]
        stack.callback(stop, ranks)
        for rank, log in enumerate(logs):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(start(argv, env=environment, stderr=log))
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(POLL_S)
        failed = _first_failure(ranks)
        if failed is None:
            return 0
        stop(ranks)
        if log := logs[failed]:
            log.seek(0)
            shutil.copyfileobj(log, sys.stderr.buffer)
            sys.stderr.flush()
        code = ranks[failed].returncode
        if code < 0:
            return fail(f"process {failed + 1} of {processes} was ended by {signal.Signals(-code).name}", 128 - code)
        return code


def _first_failure(ranks: list[subprocess.Popen]) -> int | None:
    """Return the rank that failed; of several that failed at about the same time, the lowest. None if none did."""
    if not any(rank.poll() for rank in ranks):
        return None
    time.sleep(GRACE_S)
    return next(number for number, rank in enumerate(ranks) if rank.poll())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
