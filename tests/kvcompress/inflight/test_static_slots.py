"""Slots of fixed shapes as on CUDA, where one operator writes a token and attends: equal answers, one graph."""

import pytest

from tests.kvcompress.inflight import test_in_flight as on_a_cpu
from tests.support.examples import some
from tests.support.in_flight import check_in_flight

STATIC = {"cache_implementation": "static"}


@pytest.mark.parametrize("options", [{}, {"head_budget": "adaptive"}], ids=["even", "adaptive"])
def test_answers_in_slots_of_fixed_shapes_are_as_alone(options, as_on_cuda):
    model, requests = on_a_cpu.requests_of("qwen2-vl")
    check_in_flight(model, requests, on_a_cpu.NEW, "snapkv", 2, ratio=0.3, **STATIC, **options)


@pytest.mark.parametrize(
    "evicting", some([({},), (on_a_cpu.EVICTING,)], [on_a_cpu.EVICTING]), ids=["keeping", "evicting"]
)
def test_a_step_is_one_graph(evicting, as_on_cuda):
    on_a_cpu.test_a_step_is_one_graph_and_filling_or_freeing_a_slot_compiles_nothing(evicting)


def test_a_method_that_hides_entries_attends_under_its_mask(as_on_cuda):
    model, requests = on_a_cpu.requests_of("qwen2-vl")
    check_in_flight(model, requests[1::2], on_a_cpu.NEW[1::2], "dycoke", 2, ratio=1.0, layer=1, **STATIC)
