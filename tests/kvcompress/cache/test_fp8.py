"""kv_backend=fp8: 8-bit floats as transformers' layer stores them, after any eviction."""

import pytest
import torch
from transformers import cache_utils

import kvcompress
from kvcompress.cache.storage.fp8 import Fp8Storage
from kvcompress.cache.storage.ragged import RaggedStorage
from kvcompress.check.reference import generate
from kvcompress.kernels.fp8 import pack, scale_of, unpack
from kvcompress.policy.make import make_policy
from tests.support.calibrations import calibration_of
from tests.support.examples import some
from tests.support.families import FAMILIES
from tests.support.kept import kept_of
from tests.support.strategies import METHODS, SOME_METHODS

FP8 = {"cache_implementation": "quantized", "kv_backend": "fp8"}
QWEN2 = FAMILIES["qwen2"]
MODEL = QWEN2.build()
of_transformers = pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no FP8 layer"
)


def states(entries: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, entries, dim, generator=generator).to(dtype) for dim in (24, 16))


def same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours, theirs.view(torch.uint8))


# -- the numbers


@of_transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("later", [0.0, 0.5, 3.0], ids=["zeros", "smaller", "beyond the scale"])
def test_a_prompt_and_appended_tokens_are_stored_and_read_as_by_transformers_layer(dtype, later):
    layer, prompt = cache_utils.Fp8QuantizedLayer(), states(20, dtype)
    layer.update(*prompt)
    storage = Fp8Storage(*prompt, None, None, 3, None)
    for seed in range(1, 6):  # beyond the room for three
        new = [part * later for part in states(1, dtype, seed)]
        expected = layer.update(*new)
        storage.append(*new)
        for ours, theirs in zip(storage.read(), expected, strict=True):
            assert ours.dtype == dtype
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(storage.inner.read(), (layer._quantized_keys, layer._quantized_values), strict=True):
        assert same_bytes(ours, theirs[0])
    assert [scale.item() for scale in storage.scales] == [layer._quantized_keys[1], layer._quantized_values[1]]


def test_zeros_stay_zeros():
    zeros = torch.zeros(4)
    assert torch.equal(unpack(pack(zeros, scale_of(zeros)), scale_of(zeros), torch.float32), zeros)


def test_what_lies_in_unused_slots_does_not_widen_the_scale():
    keys, values = states(10, torch.float32)
    indices = torch.arange(10).expand(2, 3, -1).clone()
    indices[0, 1, :4] = -1
    expected = [scale_of(part.masked_fill(indices[..., None] < 0, 0)) for part in (keys, values)]
    keys[0, 1, :4], values[0, 1, :4] = 1e4, 1e4
    assert list(Fp8Storage(keys, values, indices, None, 3, [26, 30]).scales) == expected


# -- in the cache


@of_transformers
@pytest.mark.parametrize("method", some([*METHODS, "full"], [*SOME_METHODS, "adakv", "full"]))
def test_what_an_eviction_keeps_is_stored_as_by_transformers_layer(method):
    """Of the same prompt in full precision, each row's and head's entries, whether heads are even or not."""
    inputs, options = QWEN2.inputs(MODEL, [45, 29]), calibration_of(method, MODEL)
    ratio = None if method == "full" else 0.4
    with kvcompress.compress(MODEL, method, ratio, **options) as whole:
        generate(MODEL, inputs, 1)
    with kvcompress.compress(MODEL, method, ratio, **options, **FP8) as session:
        generate(MODEL, inputs, 1)
    for exact, packed in zip(whole.cache.layers, session.cache.layers, strict=True):
        unused = exact.storage.visible()
        unused = None if unused is None or method == "full" else ~unused[..., None]  # of `full` pads are stored too
        for part in (0, 1):
            kept = exact.storage.read()[part]
            kept = kept if unused is None else kept.masked_fill(unused, 0)
            theirs = cache_utils.Fp8QuantizedLayer()
            theirs.lazy_initialization(kept, kept)
            ours = packed.storage.inner.read()[part]
            ours = ours if unused is None else ours.masked_fill(unused, 0)
            assert same_bytes(ours, theirs._quantized_keys[0])


@pytest.mark.parametrize("method", ["snapkv", "adakv"])
def test_a_number_takes_a_byte_and_a_layer_two_scales(method):
    with kvcompress.compress(MODEL, method, 0.5, max_new_tokens=0, window_size=4, **FP8) as session:
        generate(MODEL, QWEN2.inputs(MODEL, [200, 90]), 1)
    held = sum(len(head) for layer in kept_of(session.cache) for row in layer for head in row)
    tensors = [tensor for layer in session.cache.layers for tensor in layer.storage.inner.tensors()]
    index = sum(tensor.nbytes for tensor in tensors if tensor.element_size() > 1)
    scales = 3 * 2 * 4
    assert session.cache.nbytes - session.cache.room_nbytes == held * 2 * 16 + index + scales
    assert isinstance(session.cache.layers[0].storage.inner, RaggedStorage)


def test_the_bits_in_force_are_eight():
    assert make_policy("snapkv", 0.5, **FP8).options["kv_bits"] == 8
