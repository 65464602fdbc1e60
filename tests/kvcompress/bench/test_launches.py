"""`kvcompress bench launches`: how many kernels and waits a decode step, an eviction and a prefill may take."""

import json
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from torch.autograd import DeviceType

import kvcompress
from kvcompress.bench.launches import add_events
from kvcompress.bench.pretended.counts import Counts
from kvcompress.layer_budgets import layer_budget
from kvcompress.policy.make import make_policy
from tests.support.docs import ROOT

EVICTING = ":decode_budget=16:decode_interval=4"
STATIC = ":cache_implementation=static"
OFFLOADED = ":cache_implementation=offloaded"
OFFLOADED_STATIC = ":cache_implementation=offloaded_static"
TURBOQUANT = ":cache_implementation=quantized:kv_backend=turboquant"
FP8 = ":cache_implementation=quantized:kv_backend=fp8"
THINK = ":cache_implementation=think:key_channels=0.6"
QUANTO = ":cache_implementation=quantized:kv_backend=quanto"
HQQ = ":cache_implementation=quantized:kv_backend=hqq"


class Budget(NamedTuple):
    """Limits on the cost of a cache. Its decode steps wait for nothing.

    Attributes:
        step: kernels per layer and step above DynamicCache's.
        eviction: kernels per layer that an eviction adds; None if nothing is evicted. It waits for nothing.
        in_flight: waits of a step of `generate_many`, evicting steps included; None if that is not supported. 1: the
            tokens are chosen on the host.
        prefill: waits of the prefill. 1: a prompt's ids and mask are copied to the host together.
    """

    step: int = 0
    eviction: int | None = None
    in_flight: int | None = 1
    prefill: int = 1


# The targets are 0 for dense entries, 4 for ragged ones, 40, 1 and 1; comments say why some are missed.
BUDGETS = {
    "full": Budget(),
    "snapkv": Budget(),
    "h2o": Budget(),
    "adakv": Budget(),
    f"snapkv{STATIC}": Budget(in_flight=None),
    f"adakv{STATIC}": Budget(in_flight=None),
    f"full{OFFLOADED}": Budget(in_flight=None),
    f"snapkv{OFFLOADED}": Budget(in_flight=None),
    f"adakv{OFFLOADED}": Budget(step=4, in_flight=None),
    f"snapkv{OFFLOADED_STATIC}": Budget(in_flight=None),
    f"adakv{OFFLOADED_STATIC}": Budget(step=4, in_flight=None),
    # One kernel packs a token, one rotates queries; outputs are rotated where parts are combined.
    f"snapkv{TURBOQUANT}": Budget(step=1, in_flight=None),
    f"adakv{TURBOQUANT}": Budget(step=2, in_flight=None),
    f"snapkv{FP8}": Budget(in_flight=None),
    f"adakv{FP8}": Budget(step=1, in_flight=None),
    f"snapkv{THINK}": Budget(in_flight=None),
    # The first step divides the entries, since only the device knew during the prefill how many of a head are recent.
    f"adakv{THINK}": Budget(eviction=14, in_flight=None),
    f"streamingllm{EVICTING}": Budget(eviction=10),
    f"snapkv{EVICTING}": Budget(eviction=12),
    f"h2o{EVICTING}": Budget(eviction=14),
    "snapkv:protect=prompt:decode_budget=40:decode_interval=4": Budget(eviction=40, in_flight=None),
    f"snapkv{OFFLOADED}{EVICTING}": Budget(eviction=34, in_flight=None),
    f"adakv{OFFLOADED}{EVICTING}": Budget(step=4, eviction=40, in_flight=None),
    f"r-kv{EVICTING}": Budget(eviction=12),
    f"adakv{EVICTING}": Budget(eviction=11),
    f"criticalkv:layer_budget=pyramid{EVICTING}": Budget(eviction=33),  # it selects itself, and layers differ
}
if find_spec("optimum"):  # pip install -e .[quantized]
    BUDGETS |= {
        # The first step creates a table of the blocks.
        f"full{QUANTO}": Budget(step=1, eviction=2, in_flight=None),
        f"adakv{QUANTO}": Budget(step=1, eviction=4, in_flight=None),
    }
if find_spec("hqq"):
    BUDGETS |= {
        f"full{HQQ}": Budget(step=1, eviction=2, in_flight=None),
        f"adakv{HQQ}": Budget(step=1, eviction=4, in_flight=None),
    }


# The other methods that evict while decoding: kernels of an eviction.
EVICTIONS = {
    "adamixkv": 33, "aircache": 11, "cake": 16, "cam": 22, "capkv": 23, "chunkkv": 12, "compactor": 21,
    "criticalkv": 26, "csp": 14, "cur": 11, "d2o": 34, "defensivekv": 32, "dropkv": 32, "entropy-gated-chunkkv": 24,
    "expected-attention": 20, "finch": 11, "infinipot-v": 8, "keydiff": 9, "knorm": 8, "kvcompose": 19, "kvcrush": 21,
    "kvzip": 13, "lagkv": 10, "lava": 13, "leverage": 11, "look-m": 23, "meda": 28, "mixkv": 23, "morphkv": 11,
    "non-causal-attention": 12, "prefixkv": 17, "pyramidkv": 17, "random": 8, "recent": 9, "sagekv": 15,
    "simlayerkv": 10, "tgv-kv": 14, "tova": 11, "vl-cache": 11, "vnorm": 8,
}  # fmt: skip
for method, kernels in EVICTIONS.items():
    cluster = kvcompress.make_cluster(method)
    # The host needs to know the sizes of the layers if they follow from measurements; a second pass waits, too.
    waits = 2 if cluster.second_pass or layer_budget(cluster.layer_budget).is_measured else 1
    step = 8 * cluster.unrotated_queries  # kernels that undo the rotation of its query
    BUDGETS[f"{method}{EVICTING}"] = Budget(step, kernels, prefill=waits)

IN_FLIGHT = {cache: budget.in_flight for cache, budget in BUDGETS.items() if budget.in_flight is not None}
EVERY_TIME = ("snapkv", f"adakv{OFFLOADED}", f"snapkv{TURBOQUANT}", f"adakv{EVICTING}")
CACHES = [pytest.param(cache, marks=() if cache in EVERY_TIME else pytest.mark.slow) for cache in BUDGETS]


@pytest.fixture(scope="module")
def counted(request, tmp_path_factory) -> tuple[dict[str, dict], dict[str, dict], dict[str, list[int]]]:
    """By cache, the counts of the command, with one row and with two; and the waits of a step in flight. EVERY_TIME's,
    unless slow tests run."""
    is_slow = any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items)
    out = tmp_path_factory.mktemp("launches") / "launches"
    asked = [[name for name in names if is_slow or name in EVERY_TIME] for names in (BUDGETS, IN_FLIGHT)]
    command = [sys.executable, "-m", "tests.kvcompress.bench.count_launches", str(out), *map(json.dumps, asked)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert (out.parent / "launches_9.md").read_text().count("| ---") == 8
    runs = [json.loads((out.parent / f"launches_{run}.json").read_text())["rows"] for run in (5, 9, "rows")]
    for run in runs:
        (plain,) = (row["kernels"] for row in run if row["cache"] == "DynamicCache")
        for row in run:
            row["kernels_more"] = row["kernels"] - plain
    single, several = (
        {row["cache"].partition("@")[0]: row for row in rows} for rows in ([*runs[0], *runs[1]], runs[2])
    )
    return single, several, json.loads(done.stdout)


@pytest.fixture(scope="module")
def rows(counted) -> dict[str, dict]:
    return counted[0]


@pytest.mark.parametrize("cache", CACHES)
def test_a_decode_step_launches_no_more_than_its_budget_and_waits_for_nothing(rows, cache):
    assert rows[cache]["kernels_more"] <= BUDGETS[cache].step
    assert rows[cache]["waits"] == 0


@pytest.mark.parametrize("cache", CACHES)
def test_an_eviction_launches_no_more_than_its_budget_and_waits_for_nothing(rows, cache):
    found, budget = rows[cache]["eviction_kernels"], BUDGETS[cache].eviction
    assert (found is None) == (budget is None)
    if budget is not None:
        assert 0 < found <= budget
        assert rows[cache]["eviction_waits"] == 0


@pytest.mark.parametrize("cache", CACHES)
def test_a_prefill_waits_once_not_once_per_layer(rows, cache):
    assert rows[cache]["prefill_waits"] == BUDGETS[cache].prefill


def test_every_method_that_evicts_while_decoding_has_a_budget():
    for method in kvcompress.list_methods():
        try:
            make_policy(method, 0.4, decode_budget=16)
        except kvcompress.KVCompressError:
            continue  # it evicts nothing while decoding, or needs a file
        assert f"{method}{EVICTING}" in BUDGETS or method == "hindsight", method  # which decodes before it evicts


@pytest.mark.parametrize("cache", [cache for cache in CACHES if "decode_budget" not in cache.values[0]])
def test_a_prefill_of_several_rows_waits_once_too(counted, cache):
    assert counted[1][cache]["prefill_waits"] == 1


def test_a_step_of_requests_in_flight_waits_once(counted):
    assert counted[2]
    assert {cache: max(steps) for cache, steps in counted[2].items()}.items() <= IN_FLIGHT.items()
    assert all(min(steps) == 1 for steps in counted[2].values())


def test_what_the_profiler_finds_is_counted_in_the_same_columns_pass_by_pass():
    def event(name: str, device: DeviceType, start: int, end: int) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))

    host, device = DeviceType.CPU, DeviceType.CUDA
    events = [
        event("kvcompress pass 0", host, 0, 100),
        event("kvcompress pass 0", device, 5, 95),  # the profiler's copy, over the kernels
        *(event("cudaLaunchKernel", host, at, at + 1) for at in (1, 2)),
        *(event("gemm", device, at, at + 5) for at in (10, 20)),
        event("Memcpy HtoD", device, 30, 31),
        event("cudaStreamSynchronize", host, 40, 50),
        event("cudaDeviceSynchronize", host, 90, 99),  # our own
        event("cudaDeviceSynchronize", host, 100, 101),  # between passes
        event("kvcompress pass 1", host, 110, 200),
        event("gemm", device, 120, 125),
        event("cudaDeviceSynchronize", host, 190, 199),
    ]
    passes = [Counts(), Counts()]
    add_events(passes, events)
    assert [(counts.kernels, counts.waits) for counts in passes] == [(2, 1), (1, 0)]
    assert passes[0].waits_at["cudaDeviceSynchronize"] == 0
