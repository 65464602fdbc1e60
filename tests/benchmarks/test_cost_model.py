"""The cost model of a decode step: its arithmetic, the origin of its counts, and the claims of its page."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import cost_model, measured
from benchmarks.gpu.cost_model import H100, H200, Shape, Way, limit, step
from kvcompress.bench.cost import ASSUMED, EAGER_KERNELS, Device, device_of, launches_bind
from kvcompress.bench.pretended.device import PretendedCuda
from kvcompress.bench.shapes import SHAPES

SMALL = Shape(layers=2, products=(100, 300), head=50, entry=10, kv_heads=2)
SLOW = Device("slow", 100.0)  # bytes per second
PLAIN = replace(ASSUMED, launch=1.5, launch_in_graph=0.5, product_share=0.5, block_bandwidth=5.0)


def test_the_limit_reads_weights_and_entries_once():
    assert limit(SMALL, SLOW, batch=3, entries=4) == (2 * 400 + 50 + 3 * 4 * 2 * 10) / 100


def test_a_kernel_takes_as_long_as_its_bytes_and_no_less_than_its_launch():
    eager = Way("eager", kernels=7, kv_kernels=2)
    # Products of 2 and 6 s, two of 1.2 s over the cache that take a launch each, three others; the head 1.5 s.
    assert step(SMALL, SLOW, 3, 4, eager, PLAIN) == pytest.approx(2 * (2 + 6 + 2 * 1.5 + 3 * 1.5) + 1.5)
    in_graph = replace(eager, in_graph=True)
    assert step(SMALL, SLOW, 3, 4, in_graph, PLAIN) == pytest.approx(2 * (2 + 6 + 2 * 1.2 + 3 * 0.5) + 1)


def test_few_thread_blocks_read_slower_than_the_device():
    whole, one = Way("whole", 4, in_graph=True), Way("one block", 4, in_graph=True, blocks=1)
    # Per layer 120 bytes, by 3 * 2 blocks of 5 bytes per second.
    slower = step(SMALL, SLOW, 3, 4, one, PLAIN) - step(SMALL, SLOW, 3, 4, whole, PLAIN)
    assert slower == pytest.approx(2 * (120 / 30 - 1.2))


def test_a_shape_has_the_parameters_of_its_model():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = SHAPES["qwen2-7b"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    matrices = [each for name, each in model.named_parameters() if each.ndim == 2 and "embed" not in name]
    assert Shape.of(config).weights == 2 * sum(each.numel() for each in matrices)


@pytest.mark.parametrize("device", [H200, H100], ids=lambda device: device.name)
@pytest.mark.parametrize("share", [1.0, cost_model.KEPT])
@pytest.mark.parametrize("batch", cost_model.MOST)
def test_a_static_step_is_near_the_limit_on_paper(device, share, batch):
    shape, entries = Shape.of(SHAPES[cost_model.SHAPE]), round(share * cost_model.CONTEXT)
    taken = step(shape, device, batch, entries, cost_model.STATIC)
    assert taken <= cost_model.MOST[batch] * limit(shape, device, batch, entries)


def test_the_pages_are_what_the_commands_write():
    assert cost_model.OUT.read_text() == cost_model.markdown()
    assert (cost_model.RESULTS / "h100.md").read_text() == measured.markdown(measured.FOLDER)


def test_the_eager_kernels_of_the_rule_are_those_that_were_counted():
    counted = cost_model.counted_kernels()
    for name in ("full", "snapkv@0.2"):
        assert counted[name] == pytest.approx(EAGER_KERNELS, abs=1)


def test_an_h100s_bandwidth_is_read_off_its_properties():
    properties = SimpleNamespace(name="H100", memory_clock_rate=2_619_000, memory_bus_width=5120)
    assert device_of(properties).bandwidth == pytest.approx(H100.bandwidth, rel=0.02)


def test_launches_bind_a_small_model_and_a_short_cache_and_nothing_on_a_cpu():
    there, shape = torch.device("cuda"), Shape.of(SHAPES["qwen2-7b"])
    with PretendedCuda():
        assert launches_bind(28, shape.weights, 0, there)
        assert not launches_bind(28, shape.weights, 64 * 32768 * 28 * shape.entry, there)
        assert not launches_bind(28, 10 * shape.weights, 0, there)
        assert not launches_bind(28, shape.weights, 0, torch.device("cpu"))
