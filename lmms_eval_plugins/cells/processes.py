"""Processes of the evaluation command that this one starts, and that end with it."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcompress.command_line import TIDY_S, fail

COMMAND = [sys.executable, "-m", "lmms_eval_plugins.evaluate"]
POLL_S = 0.1
GRACE_S = 1.0  # within it processes fail for the same reason


@contextmanager
def evaluation(argv: list[str], **settings: Any) -> Iterator[subprocess.Popen]:
    """The evaluation command in a process of its own, which has ended when the block is left. `settings`: of Popen."""
    process = start(argv, **settings)
    try:
        yield process
    finally:
        stop([process])


def start(argv: list[str], **settings: Any) -> subprocess.Popen:
    """In a session of its own: Ctrl-C reaches this process alone, which stops the others."""
    return subprocess.Popen([*COMMAND, *argv], start_new_session=True, **settings)


def stop(processes: list[subprocess.Popen]) -> None:
    """End what still runs: SIGTERM, so that it tidies up, and SIGKILL when it took too long."""
    running = [process for process in processes if process.poll() is None]
    try:
        for process in running:
            process.terminate()
        end = time.monotonic() + TIDY_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0))
    finally:  # also after a second Ctrl-C
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_ranks(processes: int, argv: list[str], variables: dict[str, str] | None = None) -> int:
    """The evaluation command in so many ranks on this machine; the exit code, of the first that fails.

    What rank 0 says is shown; of another one only what it said when it failed. `variables`: of the ranks' environment.
    """
    shared = {**(variables or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # else each takes all cores
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
    """The rank that failed, the lowest of those that failed at about the same time."""
    if not any(rank.poll() for rank in ranks):
        return None
    time.sleep(GRACE_S)
    return next(number for number, rank in enumerate(ranks) if rank.poll())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
