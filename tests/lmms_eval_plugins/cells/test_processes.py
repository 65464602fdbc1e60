"""Processes that end with the one that started them, and what is said of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from kvcompress import command_line
from kvcompress.command_line import exit_code
from kvcompress.errors import KVCompressError, MissingFile
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import processes
from lmms_eval_plugins.cells.errors import DamagedFile, EvaluationFailed, UsageError

RANKS = """
import os, signal, sys, time
rank, what = os.environ["RANK"], sys.argv[1]
print(f"rank {rank} of {os.environ['WORLD_SIZE']} at {os.environ['MASTER_ADDR']}", file=sys.stderr)
if what == "fail" and rank == "1" or what == "both":
    sys.exit("error: it broke") if rank == "1" else sys.exit(2)
if what == "die" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if what != "end":
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    monkeypatch.setattr(processes, "POLL_S", 0.01)


@pytest.fixture
def started(monkeypatch):
    """The processes that are started, each of which runs RANKS in place of an evaluation."""
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-c", RANKS])
    all_of_them, original = [], processes.start

    def start(argv, **settings):
        all_of_them.append(original(argv, **settings))
        return all_of_them[-1]

    monkeypatch.setattr(processes, "start", start)
    return all_of_them


def test_ranks_know_their_place_and_only_the_first_is_heard(started, capfd):
    assert processes.run_ranks(2, ["end"]) == 0
    assert capfd.readouterr().err == "rank 0 of 2 at 127.0.0.1\n"
    assert [process.returncode for process in started] == [0, 0]


def test_a_rank_that_fails_is_heard_and_ends_the_others(started, capfd):
    begin = time.monotonic()
    assert processes.run_ranks(3, ["fail"]) == 1
    assert time.monotonic() - begin < 30
    assert capfd.readouterr().err.splitlines()[-2:] == ["rank 1 of 3 at 127.0.0.1", "error: it broke"]
    assert [process.returncode for process in started] == [-signal.SIGTERM, 1, -signal.SIGTERM]


def test_of_ranks_that_fail_together_the_first_is_heard(started, capfd, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 3)  # the first may start later on a busy machine
    assert processes.run_ranks(2, ["both"]) == 2
    assert "it broke" not in capfd.readouterr().err


def test_a_rank_that_is_killed_is_named(started, capfd):
    assert processes.run_ranks(2, ["die"]) == 128 + signal.SIGKILL
    assert capfd.readouterr().err.splitlines()[-1] == "error: process 2 of 2 was ended by SIGKILL"


TASKS = """
import os, sys, time
from kvcompress import command_line
from kvcompress.command_line import exit_code
from lmms_eval_plugins.cells.errors import DamagedFile, EvaluationFailed, UsageError
from lmms_eval_plugins.cells.processes import TaskFailures

def evaluate(argv):
    failures, rank = TaskFailures(argv), os.environ["RANK"]
    for task in argv:
        with failures.noted(task):
            if task == "missing":
                raise EvaluationFailed("missing: no data")
            if task in failures.reasons:
                continue
            if task == "broken" and rank == "1":
                raise EvaluationFailed("broken: its scorer is")
            if task == "broken":
                time.sleep(600)  # for the other
            if rank == "0":
                print("did", task, flush=True)
    failures.raise_all()

sys.exit(exit_code(evaluate, sys.argv[1:], "cells"))
"""


def test_ranks_are_started_again_without_the_task_that_ended_them(started, monkeypatch, capfd):
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-c", TASKS])
    assert processes.run_tasks(2, ["missing", "a", "broken", "b"]) == 1
    out, err = capfd.readouterr()
    assert out.split("did ")[-2:] == ["a\n", "b\n"], "the last ranks have done all others"
    lines = err.splitlines()
    assert [line for line in lines if line.endswith("the others continue")] == [
        "task missing is left out, the others continue", "task broken is left out, the others continue",
    ]  # fmt: skip
    assert "error: broken: its scorer is" in lines
    assert lines[-1] == ("error: 2 task(s) without results: missing (missing: no data); broken (broken: its scorer is)")
    assert len(started) == 6


CELLS = """
import os, sys, time
from kvcompress.command_line import exit_code
from kvcompress.errors import KVCompressError
from lmms_eval_plugins.cells.processes import TaskFailures, left_out_of_a_group

def evaluate(argv):
    failures, rank = TaskFailures(["t"]), os.environ["RANK"]
    for cell in argv:
        if f"t/{cell}" in failures.left_out:
            continue
        with failures.noted("t", cell=cell), left_out_of_a_group("t", cell, cell != "named"):
            if cell in ("refused", "named"):
                if rank == "0":
                    time.sleep(600)  # for the other
                raise KVCompressError("row 0 cannot keep all")
            if rank == "0":
                print("did", cell, flush=True)
    return 0

sys.exit(exit_code(evaluate, sys.argv[1:], "cells"))
"""


def test_ranks_are_started_again_without_a_method_of_all_that_refuses_a_prompt(started, monkeypatch, capfd):
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-c", CELLS])
    assert processes.run_tasks(2, ["a", "refused", "b"]) == 0
    out, err = capfd.readouterr()
    assert out.split("did ")[-2:] == ["a\n", "b\n"]
    assert err.splitlines()[-1] == "cell t/refused is left out, the others continue"
    assert processes.run_tasks(2, ["a", "named", "b"]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == "error: row 0 cannot keep all"
    assert len(started) == 6


def test_ranks_with_a_single_task_or_nothing_that_failed_are_started_once(started, monkeypatch, capfd):
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-c", TASKS])
    assert processes.run_tasks(2, ["a", "b"]) == 0
    assert processes.run_tasks(2, ["missing"]) == 1
    assert capfd.readouterr().err.splitlines() == ["error: missing: no data"]
    assert len(started) == 4


def test_of_what_ranks_say_the_first_is_the_reason(tmp_path, monkeypatch):
    for pid, (at, task) in enumerate(((2.0, "later"), (1.0, "first"))):
        monkeypatch.setattr(processes.os, "getpid", lambda pid=pid: pid)
        monkeypatch.setattr(processes.time, "time", lambda at=at: at)
        processes.leave(tmp_path, task, "no data" if task == "first" else "connection closed by peer")
    assert processes.collect(tmp_path) == "first"
    assert processes.failed_tasks(tmp_path) == {"first": "no data"}
    assert processes.collect(tmp_path) is None


@pytest.mark.parametrize("error", [MissingFile("x.safetensors: no such file"), UsageError("no"), DamagedFile("bad")])
def test_an_error_that_says_what_is_wrong_is_one_line_among_tasks(error, capsys):
    failures = processes.TaskFailures(["one", "two"])
    with failures.noted("one"):
        raise error
    assert capsys.readouterr().err == f"error: {error} (task one is left out, the others continue)\n"
    assert failures.reasons == {"one": str(error)}


def test_a_cell_is_at_fault_if_another_is_complete_and_files_and_ranks_are_not_concerned(monkeypatch, capsys):
    broken = ValueError("its own")
    for error, is_complete, ranks in ((broken, False, 1), (broken, True, 2), (OSError("disk"), True, 1)):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        failures = processes.TaskFailures(["one"])
        failures.working = {"one"} if is_complete else set()
        with pytest.raises(type(error)), failures.noted("one", cell="one/snapkv-0.5"):
            raise error
    monkeypatch.delenv("WORLD_SIZE")
    failures = processes.TaskFailures(["one", "two"])
    failures.working.add("one")
    for task in ("one", "two"):
        with failures.noted(task, cell=f"{task}/snapkv-0.5"):
            raise broken
    assert (failures.cells, failures.reasons) == (
        {"one/snapkv-0.5": "ValueError: its own"},
        {"two": "ValueError: its own"},
    )
    assert "(cell one/snapkv-0.5 is left out, the others continue)" in capsys.readouterr().err
    with pytest.raises(EvaluationFailed, match=r"1 task.s. without results: two .*; 1 cell.s. without results: one/"):
        failures.raise_all()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_ranks_with_one_line(started, capfd, monkeypatch, number):
    def sleep(seconds):
        os.kill(os.getpid(), number)

    monkeypatch.setattr(processes.time, "sleep", sleep)
    assert exit_code(lambda argv: processes.run_ranks(2, argv), ["wait"], "cells") == 128 + number
    (line,) = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("rank ")]
    assert line.startswith("error: interrupted" if number == signal.SIGINT else f"error: ended by {number.name}")
    assert line.endswith("finished cells are kept, the same command continues from there")
    assert all(process.returncode is not None for process in started)


CHILD = """
import os, sys, time
from lmms_eval_plugins.cells import processes
while sys.argv[1:] == ["late"] and str(os.getppid()) == os.environ[processes.STARTED_BY]:
    time.sleep(0.01)
print("ready", flush=True)
processes.end_with_parent()
time.sleep(60)
"""
PARENT = f"""
import sys
from lmms_eval_plugins.cells import processes
processes.COMMAND = [sys.executable, "-c", {CHILD!r}]
with processes.evaluation(sys.argv[1:]) as process:
    print("started", flush=True)
    process.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such call")
@pytest.mark.parametrize("when", ["", "late"])
def test_an_evaluation_ends_with_a_process_that_is_killed_even_before_it_can_ask_for_that(when):
    command = [sys.executable, "-c", PARENT, *filter(None, [when])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        assert when or process.stdout.readline() == "ready\n"
        start = time.monotonic()
        process.kill()
        process.stdout.read()  # its end comes when the child, which also has the pipe, is gone
    assert time.monotonic() - start < 30


def test_an_evaluation_asks_to_end_with_the_process_that_started_it(monkeypatch):
    asked = []
    monkeypatch.setattr(evaluate, "end_with_parent", lambda: asked.append(True))
    for variable, times in ((None, 0), (processes.STARTED_BY, 1), ("LOCAL_RANK", 2)):
        if variable is not None:
            monkeypatch.setenv(variable, "0")
        with pytest.raises(UsageError, match="MODEL is missing"):
            evaluate.evaluate(["tiny_textvqa"])
        assert len(asked) == times


def test_a_process_that_does_not_end_is_killed_with_its_own(monkeypatch):
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, "-c", stubborn])
    monkeypatch.setattr(processes, "TIDY_S", 0.1)
    with processes.evaluation([], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
    assert process.returncode == -signal.SIGKILL


# -- signals in this process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_tidies_up_and_is_asked_once(number, capsys, monkeypatch):
    tidied = []

    def command(argv):
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # again, while it tidies up
            tidied.append(True)

    before = signal.getsignal(number)
    assert exit_code(command, [], "trials") == 128 + number
    assert tidied
    assert signal.getsignal(number) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert "finished trials are kept" in line
    monkeypatch.setenv("LOCAL_RANK", "1")  # whoever started this process says it
    assert exit_code(command, [], "trials") == 128 + number
    assert capsys.readouterr().err == ""


def test_a_signal_that_was_swallowed_may_be_sent_again(monkeypatch):
    monkeypatch.setattr(command_line, "TIDY_S", 0)

    def command(argv):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    assert exit_code(command, [], "cells") == 143


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert exit_code(lambda argv: os.kill(os.getpid(), signal.SIGHUP), [], "cells") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KVCompressError("no"), 2, "error: no"),
        (EvaluationFailed("no"), 1, "error: no"),
        (
            OSError(28, "No space left on device", "/x/y"),
            1,
            "error: /x/y cannot be written or read: No space left on device",
        ),
        (OSError(27, "File too large", "/x/y"), 1, "error: /x/y cannot be written or read: File too large"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\n See documentation"),
            1,
            "error: not enough memory: CUDA out of memory. Tried to allocate 9 GiB. See documentation",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to get 9 bytes."),
            1,
            "error: not enough memory: DefaultCPUAllocator: can't allocate memory: you tried to get 9 bytes.",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            1,
            "error: not enough memory: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        (MemoryError(), 1, "error: not enough memory: "),
    ],
)
def test_an_error_is_one_line(error, code, line, capsys):
    def command(argv):
        raise error

    assert exit_code(command, [], "cells") == code
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize("closed", ["1>&-", "1>&- 2>&-"])
def test_a_closed_stream_fails_no_command(closed, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from kvcompress.command_line import exit_code, leave\n"
        "leave(exit_code(lambda argv: print('said', sys.stdout.isatty()), []))\n"
    )
    assert subprocess.run(f"{sys.executable} {program} {closed}", shell=True, timeout=60).returncode == 0


def test_characters_that_the_streams_encoding_lacks_are_escaped():
    program = "from kvcompress.command_line import exit_code\nexit_code(lambda argv: print('56 ± 2'), [])"
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
    )
    assert (said.stdout, said.returncode) == (b"56 \\xb1 2\n", 0)


def test_a_commands_own_exit_code_is_kept():
    assert exit_code(lambda argv: 3, [], "cells") == 3


def test_a_process_leaves_with_its_code_and_after_what_was_registered_for_its_end():
    program = """
import atexit, sys
from kvcompress.command_line import leave
atexit.register(print, "tidied")
print("written")
print("said", end="", file=sys.stderr)
leave(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "written\ntidied\n", "said")
