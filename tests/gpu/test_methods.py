"""Every method and family on a CUDA device: what the CPU selects, what a masked full cache answers, no more memory."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import kvcompress
from kvcompress.check.reference import generate, only_attending_to
from tests.gpu.cases import DTYPES, NEW, check_as_on_the_cpu, few, on
from tests.support.calibrations import calibration_of
from tests.support.examples import paired
from tests.support.families import FAMILIES
from tests.support.strategies import METHODS, SOME_METHODS

pytestmark = pytest.mark.gpu
# The most and the mean difference of logits.
APART = {torch.float32: (1e-3, 1e-4), torch.float16: (0.1, 0.01), torch.bfloat16: (0.25, 0.03)}
# A merging method's entries are no entries of the full cache, so that no mask of that equals it.
UNMERGED = [method for method in METHODS if getattr(kvcompress.list_methods()[method].cls, "merge", "none") == "none"]
EVERY = [(method, family) for method in METHODS for family in FAMILIES]


@pytest.mark.parametrize(("method", "family"), few(EVERY, 27))
def test_a_device_selects_what_the_cpu_selects(device, method, family):
    check_as_on_the_cpu(device, family, method, 0.3, **calibration_of(method, FAMILIES[family].build()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("method", "family"), few(paired(UNMERGED, list(FAMILIES)), 12))
def test_decoding_equals_the_masked_full_cache(device, method, family, dtype, attention):
    model, inputs = on(device, family, dtype)
    model.set_attn_implementation(attention)
    with kvcompress.compress(model, method, 0.3, **calibration_of(method, model)) as session:
        tokens, logits = generate(model, inputs, NEW)
    model.set_attn_implementation("sdpa")
    with only_attending_to(model, [session.cache.kept_indices(layer) for layer in range(len(session.cache.layers))]):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    difference = (logits.float() - expected.float()).abs()
    most, mean = APART[dtype]
    assert difference.max() < most
    assert difference.mean() < mean


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", few(FAMILIES, 3))
def test_ratio_one_is_bit_identical(device, family, dtype):
    model, inputs = on(device, family, dtype)
    tokens, expected = generate(model, inputs, NEW)
    with kvcompress.compress(model, "snapkv", 1.0):
        ours, logits = generate(model, inputs, NEW)
    assert torch.equal(ours, tokens)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("method", sorted({*SOME_METHODS} - {"full"}))
def test_a_long_prompt_peaks_below_the_full_cache(cuda, method):
    """The prompt's keys and values of a layer are freed as soon as the layer is compressed."""
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=65536,
    )
    with cuda:
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, 1000, (1, 32768), device=cuda)

    def peak(method: str, ratio: float) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        # A layer budget that is measured keeps the whole prompt until the last layer is done.
        even = {} if method == "full" else {"layer_budget": "uniform"}
        with torch.no_grad(), kvcompress.compress(model, method, ratio, **even, **calibration_of(method, model)):
            model(ids, logits_to_keep=1)
        return torch.cuda.max_memory_allocated() - before

    if kvcompress.list_methods()[method].cls.second_pass:
        pytest.skip("a method that reads twice keeps the whole prompt until then")
    full_cache = 2 * 16 * 32768 * 1024 * 2  # bytes: keys and values, layers, tokens, width, bf16
    peak("full", 1.0)  # warm-up: workspaces
    assert peak("full", 1.0) - peak(method, 0.1) > 0.7 * full_cache
