"""Nothing mixes the devices, and no decode step waits for the device: seen on a CUDA device that is pretended."""

import copy

import pytest
import torch
from transformers import Cache, DynamicCache

import kvcompress
from kvcompress.check.reference import generate
from tests.gpu.cases import STEPS
from tests.support.calibrations import calibration_of
from tests.support.examples import paired, some
from tests.support.families import FAMILIES
from tests.support.pretended_cuda import CUDA, pretended_cuda
from tests.support.strategies import METHODS

NEW = 4
EVICTING = {"decode_budget": 12, "decode_interval": 2}
# What of the pretence is not as on a device: a parameter there is of another type.
UNLIKE = {"criticalkv"}


def check(family: str, method: str, ratio: float | None, **options: object) -> None:
    """Raises AssertionError where the logits are others than on the CPU, RuntimeError where the devices are mixed."""
    model = FAMILIES[family].build()
    inputs = FAMILIES[family].inputs(model, [40, 23], [1, 0] if FAMILIES[family].is_vlm else None)
    with kvcompress.compress(model, method, ratio, **options):
        tokens, expected = generate(model, inputs, NEW)
    with pretended_cuda():
        there = copy.deepcopy(model).to(CUDA)
        inputs = {name: part.to(CUDA) for name, part in inputs.items()}
        with kvcompress.compress(there, method, ratio, **options):
            _, logits = generate(there, inputs, NEW, tokens.to(CUDA))
        logits = logits.cpu()
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_the_pretence_refuses_to_mix_devices_and_notes_who_waits():
    with pretended_cuda() as mode:
        there = torch.arange(4, device=CUDA)
        assert there.device == CUDA
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(4)
        there[1:3] = 7
        assert not mode.waits
        assert there.tolist() == [0, 7, 7, 3]
        assert (there + torch.tensor(1)).device == CUDA
        assert len(mode.waits) == 1


@pytest.mark.parametrize(
    ("method", "family"),
    some(paired([method for method in METHODS if method not in UNLIKE], list(FAMILIES)), ["adakv", "h2o", "kvzip"]),
)
def test_methods_compute_where_the_model_is(method, family):
    check(family, method, 0.3, **calibration_of(method, FAMILIES[family].build()))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("snapkv", EVICTING),
        ("adakv", EVICTING),
        ("snapkv", {"prefill_chunk": 16, "merge": "pivot"}),
        ("snapkv", {"cache_implementation": "static", "max_new_tokens": NEW}),
        ("snapkv", {"cache_implementation": "offloaded"}),
        ("adakv", {"cache_implementation": "offloaded"}),
        ("snapkv", {"cache_implementation": "offloaded_static", "max_new_tokens": NEW}),
        ("adakv", {"cache_implementation": "quantized", "kv_backend": "turboquant", "kv_bits": 4}),
    ],
    ids=str,
)
def test_ways_through_the_engine_compute_where_the_model_is(method, options):
    check("qwen2", method, 0.4, **options)


@pytest.mark.parametrize(
    ("method", "options"),
    STEPS,
    ids=str,
)
@torch.no_grad()
def test_a_decode_step_waits_no_more_than_with_transformers_cache(method, options):
    model = FAMILIES["llama"].build()
    with pretended_cuda() as mode:
        there = copy.deepcopy(model).to(CUDA)
        ids = torch.arange(10, 50, device=CUDA)[None]
        position = torch.tensor([[40]], device=CUDA)

        def waits(cache: Cache) -> list[str]:
            there(ids, past_key_values=cache)
            mode.waits.clear()
            there(ids[:, :1], position_ids=position, past_key_values=cache)
            return list(mode.waits)

        theirs = waits(DynamicCache(config=there.config))
        ratio = None if method == "full" else 0.3
        with kvcompress.attach(there):
            cache = kvcompress.CompressedCache(there.config, method, ratio, max_new_tokens=8, **options)
            assert waits(cache) == theirs
