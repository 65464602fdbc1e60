"""The CUDA device that is none: what it refuses, notes and counts, and the device's own tests on it."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from kvcompress.bench.pretended.device import PretendedCuda
from kvcompress.device import fetched, on_device
from tests.support.docs import ROOT


@pytest.fixture
def gpu():
    with PretendedCuda() as gpu:
        yield gpu


def test_it_refuses_to_mix_devices(gpu):
    there = torch.arange(4, device="cuda")
    assert there.device == torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(4)
    with pytest.raises(RuntimeError, match="not implemented for"):
        there @ there
    with pytest.raises(TypeError, match="to numpy"):
        there.numpy()


def test_it_notes_who_waits(gpu):
    there = torch.arange(4, device="cuda")
    with gpu.counting() as counts:
        there[1:3] = 7
        there + torch.tensor(1)  # a number of the host's is an argument
    assert counts.waits == 0
    for wait in (there.tolist, there.cpu, there.nonzero, lambda: there[there > 1], lambda: int(there[0])):
        with gpu.counting() as counts:
            wait()
        assert counts.waits == 1
    gpu.on_wait = "error"
    with pytest.raises(RuntimeError, match="synchronizing"):
        there.tolist()


def test_a_factorisation_waits_only_if_its_errors_are_checked(gpu):
    there = torch.eye(3, device="cuda")
    for factorise, waits in (
        (lambda: torch.linalg.cholesky_ex(there), 0),
        (lambda: torch.linalg.cholesky_ex(there, check_errors=True), 1),
        (lambda: torch.linalg.cholesky(there), 1),
        (lambda: torch.linalg.inv(there), 1),
    ):
        with gpu.counting() as counts:
            factorise()
        assert counts.waits == waits


def test_it_counts_kernels_and_bytes(gpu):
    there = torch.ones(4, 8, device="cuda")
    with gpu.counting() as counts:
        (there + there).view(8, 4).transpose(0, 1)
    assert (counts.kernels, counts.bytes) == (1, 2 * there.nbytes)


def test_it_counts_memory_as_long_as_a_tensor_holds_it(gpu):
    before = gpu.live
    there = torch.zeros(1000, device="cuda")
    part = there[:10]
    del there
    assert gpu.live == before + 4000
    del part
    assert gpu.live == before
    assert torch.cuda.max_memory_allocated() >= before + 4000


def test_numbers_go_there_without_a_wait_and_come_back_with_one(gpu):
    with gpu.counting() as counts:
        there = on_device([3, 5], torch.device("cuda"))
    assert counts.waits == 0
    mask = torch.tensor([[True], [False]]).to("cuda")
    with gpu.counting() as counts:
        numbers, nothing, flags = fetched(there, None, mask)
    assert counts.waits == 1
    assert numbers.tolist() == [3, 5]
    assert nothing is None
    assert flags.tolist() == [[True], [False]]
    assert flags.dtype == torch.bool


def test_threads_that_start_on_it_see_it(gpu):
    devices = []
    thread = threading.Thread(target=lambda: devices.append((torch.ones(2, device="cuda") + 1).device))
    thread.start()
    thread.join()
    assert devices == [torch.device("cuda", 0)]


def on_the_device(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """tests/gpu in a process of its own, since Triton reads the interpreter's variable on import."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.pretended", "-p", "no:cacheprovider", "-m", "gpu"]
    return subprocess.run(
        [*command, "tests/gpu", *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_some_of_the_device_s_tests_pass_on_it():
    done = on_the_device("-n", "0", PRETENDED_EVERY="400", PRETENDED_FIRST="9", PRETENDED_ALSO="ragged_entries")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
def test_all_of_the_device_s_tests_pass_on_it():
    done = on_the_device("-n", "2")
    assert done.returncode == 0, done.stdout[-3000:]
