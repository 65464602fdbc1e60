"""Run the evaluation command in child processes that end with this one."""

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
GRACE_S = 1.0  # processes that fail within this time fail for the same reason


@contextmanager
def evaluation(argv: list[str], **settings: Any) -> Iterator[subprocess.Popen]:
    """Run the evaluation command in a child process that ends at the latest with the block. `settings` go to Popen."""
    process = start(argv, **settings)
    try:
        yield process
    finally:
        stop([process])


def start(argv: list[str], **settings: Any) -> subprocess.Popen:
    """Start the command in its own session: Ctrl-C reaches only this process, which stops the others."""
    return subprocess.Popen([*COMMAND, *argv], start_new_session=True, **settings)


def stop(processes: list[subprocess.Popen]) -> None:
    """Stop running processes with SIGTERM, so that they clean up, and with SIGKILL if that takes too long."""
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
