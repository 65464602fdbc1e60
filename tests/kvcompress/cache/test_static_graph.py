"""A decode step in fixed shapes as Inductor compiles it for CUDA: one graph with few kernels."""

import json
import os
import subprocess
import sys

import pytest

from kvcompress.bench.cost import GRAPH_KERNELS

METHODS = ("full", "snapkv", "adakv")
MOST_BESIDE_LAYERS = 3  # the last norm, the logits, the count of tokens


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], dict]:
    """By method and number of layers, the compiled steps."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.support.inductor_code", *METHODS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(line["method"], line["layers"]): line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_prompts_are_answered_by_one_graph(compiled, method):
    for layers in (2, 3):
        assert (compiled[method, layers]["graphs"], compiled[method, layers]["breaks"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_of_the_graph_has_so_many_kernels(compiled, method):
    """Seven products, two norms, the rotation of queries and of keys, the MLP's gate, and the operator's two.

    This is the cost model's number."""
    few, more = (compiled[method, layers]["kernels"] for layers in (2, 3))
    assert more - few == GRAPH_KERNELS
    assert few - 2 * GRAPH_KERNELS <= MOST_BESIDE_LAYERS
