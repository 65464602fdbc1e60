"""Runs of pytest in processes that are forked from one with torch and transformers imported, on copies of the files."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("kvcompress", "lmms_eval_plugins", "tests", "benchmarks")
PRELOADED = ("kvcompress.hooks.session", "tests.support.families", "tests.support.strategies")
PRELOADED_PLUGIN = ("lmms_eval.evaluator", "lmms_eval.tasks", "lmms_eval_plugins.evaluate")


@dataclass
class Job:
    """What one process does.

    Attributes:
        run: takes the folder of the copy, returns an exit status.
        limit: seconds after which it is stopped.
        changes: file of the copy -> what stands in it meanwhile.
        status: the exit status afterwards, negative after a signal; `stopped`: it ran past its limit.
        seconds: of the CPU that it took.
    """

    name: str
    run: Callable[[Path], int]
    limit: float
    changes: dict[str, bytes] = field(default_factory=dict)
    status: int | None = None
    stopped: bool = False
    seconds: float = 0.0
    output: str = ""


class Workers:
    """So many copies of the repository's files, each of which runs one job at a time."""

    def __init__(self, count: int):
        self.folder = tempfile.TemporaryDirectory(prefix="kvcompress-tests-")
        self.copies = [_copy(Path(self.folder.name) / str(number)) for number in range(count)]
        self.running: dict[int, tuple[Job, Path, float]] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in self.running:
            _stop(pid)
        self.folder.cleanup()

    def preload(self, lmms_eval: bool) -> None:
        """Import once what the packages and their tests import, and forget the packages: a forked process then has
        torch and transformers at hand, whose import takes longer than most tests."""
        sys.dont_write_bytecode = True
        sys.path[:] = [str(self.copies[0]), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        _forget()
        for name in (*PRELOADED, *(PRELOADED_PLUGIN if lmms_eval else ())):
            importlib.import_module(name)
        _forget()
        sys.path[:] = sys.path[1:]
        gc.collect()
        gc.freeze()  # a forked process need not look through it
        for job in self.run(Job("", _compile, 900) for _ in self.copies):
            if job.status:
                raise RuntimeError(f"the tests cannot be collected:\n{job.output[-3000:]}")

    def run(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """The jobs as they end."""
        jobs, free, todo = iter(jobs), list(self.copies), True
        while todo or self.running:
            while todo and free:
                job = next(jobs, None)
                todo = job is not None
                if todo:
                    copy = free.pop()
                    self.running[_fork(job, copy)] = job, copy, time.monotonic()
            for pid, (job, copy, start) in list(self.running.items()):
                done, status, used = os.wait4(pid, os.WNOHANG)
                job.seconds = used.ru_utime + used.ru_stime
                job.stopped = not done and time.monotonic() - start > job.limit
                if job.stopped:
                    _stop(pid)
                if not done and not job.stopped:
                    continue
                job.status = os.waitstatus_to_exitcode(status) if done else -signal.SIGKILL
                job.output = (copy / "output.txt").read_text(errors="replace")
                for file, (before, times) in _BEFORE.pop(pid).items():
                    (copy / file).write_bytes(before)
                    os.utime(copy / file, ns=times)
                del self.running[pid]
                free.append(copy)
                yield job
            time.sleep(0.05)


def _compile(copy: Path) -> int:
    """Write bytecode of all, which later processes of this copy only read: a changed file has another time."""
    import pytest

    sys.dont_write_bytecode = False
    return pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"])


# process -> the files that it changed, as they stood: their bytes and times
_BEFORE: dict[int, dict[str, tuple[bytes, tuple[int, int]]]] = {}


def _fork(job: Job, copy: Path) -> int:
    stats = {file: (copy / file).stat() for file in job.changes}
    before = {file: ((copy / file).read_bytes(), (s.st_atime_ns, s.st_mtime_ns)) for file, s in stats.items()}
    for file, code in job.changes.items():
        (copy / file).write_bytes(code)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        _BEFORE[pid] = before
        return pid
    status = 3
    try:
        os.setsid()
        with (copy / "output.txt").open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        status = int(job.run(copy))
        sys.stdout.flush()
    finally:
        os._exit(status)


def _stop(pid: int) -> None:
    """End a process and what it started."""
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _forget() -> None:
    for name in list(sys.modules):
        if name.split(".")[0] in OURS:
            del sys.modules[name]


def _copy(folder: Path) -> Path:
    """The repository's files, without what git ignores."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() and not (ROOT / name).readlink().is_absolute():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to((ROOT / ".venv").resolve())
    return folder
