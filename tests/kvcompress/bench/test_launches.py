"""`kvcompress bench launches`: how many kernels and waits a decode step, an eviction and a prefill may take."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from kvcompress.__main__ import main
from kvcompress.bench.launches import add_events
from kvcompress.bench.pretended.counts import Counts

EVICTING = ":decode_budget=16:decode_interval=4"
TURBOQUANT = ":cache_implementation=quantized:kv_backend=turboquant"
# Cache -> kernels per layer of a step above DynamicCache's, at most, and its waits.
STEPS = {
    "full": (0, 0),
    "snapkv": (0, 0),
    "h2o": (0, 0),
    "adakv": (4, 0),
    "snapkv:cache_implementation=offloaded": (0, 0),
    f"snapkv{TURBOQUANT}": (4, 0),
    f"adakv{TURBOQUANT}": (3, 0),
    f"streamingllm{EVICTING}": (0, 0),
    f"h2o{EVICTING}": (1, 0),  # remembers its queries
    f"r-kv{EVICTING}": (1, 0),
    f"adakv{EVICTING}": (5, 0),
}
# Method -> kernels per layer that an eviction adds, at most, and its waits, of all layers.
EVICTIONS = {"streamingllm": (40, 0), "h2o": (40, 0), "r-kv": (62, 0), "adakv": (163, 4)}
# Cache -> waits of a prefill; of all others 1: a prompt's ids and mask come to the host in one copy.
PREFILLS = {"snapkv:cache_implementation=offloaded": 13, f"snapkv{TURBOQUANT}": 3}  # 4 layers' tensors; 2 tables


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, dict]:
    """By cache, what the command counted. In a process of its own: Triton is told of its interpreter at the start."""
    out = tmp_path_factory.mktemp("launches") / "launches"
    sizes = ["--length", "96", "--new", "9", "--ratio", "0.25"]
    command = [sys.executable, "-m", "kvcompress", "bench", "launches", "--shape", "tiny", "--out", str(out), *sizes]
    subprocess.run([*command, "--methods", *STEPS], check=True, capture_output=True, env={**os.environ})
    assert (out.parent / "launches.md").read_text().count("|---") == 8
    counted = json.loads(out.with_suffix(".json").read_text())["rows"]
    return {row["cache"].partition("@")[0]: row for row in counted}


@pytest.mark.parametrize("cache", STEPS)
def test_a_decode_step_launches_and_waits_no_more_than_its_budget(rows, cache):
    more, waits = STEPS[cache]
    assert rows[cache]["kernels"] <= rows["DynamicCache"]["kernels"] + more
    assert rows[cache]["waits"] == waits


@pytest.mark.parametrize("method", EVICTIONS)
def test_an_eviction_launches_and_waits_no_more_than_its_budget(rows, method):
    row, (kernels, waits) = rows[method + EVICTING], EVICTIONS[method]
    assert 0 < row["eviction_kernels"] <= kernels
    assert row["eviction_waits"] == waits


@pytest.mark.parametrize("cache", STEPS)
def test_a_prefill_waits_once(rows, cache):
    assert rows[cache]["prefill_waits"] == PREFILLS.get(cache, 1)


def test_what_the_profiler_finds_is_counted_in_the_same_columns():
    def event(name: str, device: DeviceType) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device)

    counts = Counts()
    kernels = [event("gemm", DeviceType.CUDA), event("gemm", DeviceType.CUDA), event("Memcpy HtoD", DeviceType.CUDA)]
    calls = ["cudaLaunchKernel", "cudaStreamSynchronize", "cudaDeviceSynchronize"]  # the last is the profiler's own
    add_events(counts, [*kernels, *(event(name, DeviceType.CPU) for name in calls)])
    assert (counts.kernels, counts.waits) == (2, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--shape", "tony"], "'tiny'"),
        (["--shape", "tiny", "--methods", "q-filters"], "calibration"),
        (["--shape", "tiny", "--methods", "snapkw"], "'snapkv'"),
        ([], "--shape"),
    ],
)
def test_what_is_wrong_is_one_line(given, said, capsys):
    assert main(["bench", "launches", *given]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    assert said in error
