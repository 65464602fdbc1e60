"""The same promises on a CUDA device: `pytest -m gpu`. Nothing here needs a hub or lmms-eval."""

import copy

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import kvcompress
from benchmarks.ragged_decode import ragged_case as benchmark_case
from benchmarks.ragged_decode import ways_to_attend
from kvcompress.kernels.ragged_decode import ragged_decode, ragged_decode_reference
from tests.support.calibrations import calibration_of
from tests.support.families import FAMILIES
from tests.support.masked_reference import generate, only_attending_to
from tests.support.ragged_cases import TOLERANCE, check_triton, check_turboquant_triton, ragged_case
from tests.support.strategies import METHODS

pytestmark = pytest.mark.gpu
NEW = 6


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda")


def on(device: torch.device, family: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict]:
    model = copy.deepcopy(FAMILIES[family].build()).to(device, dtype)
    images = [1, 0] if FAMILIES[family].is_vlm else None
    inputs = FAMILIES[family].inputs(model, [60, 33], images)
    return model, {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def kept_of(session: kvcompress.Session) -> list:
    return [session.cache.kept_indices(layer) for layer in range(len(session.cache.layers))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_cuda_selects_what_the_cpu_selects(cuda, family, method):
    logits, kept = {}, {}
    tokens = None
    for device in (torch.device("cpu"), cuda):
        model, inputs = on(device, family, torch.float32)
        with kvcompress.compress(model, method, 0.3, **calibration_of(method, model)) as session:
            forced = None if tokens is None else tokens.to(device)
            tokens, logits[device.type] = generate(model, inputs, NEW, forced)
        kept[device.type] = {
            (layer, row, head, column)
            for layer, rows in enumerate(kept_of(session))
            for row, heads in enumerate(rows)
            for head, columns in enumerate(heads)
            for column in columns.tolist()
        }
    both = kept["cpu"] & kept["cuda"]
    assert len(both) / len(kept["cpu"]) > 0.98  # a tie in fp32 may fall the other way
    if kept["cpu"] == kept["cuda"]:
        torch.testing.assert_close(logits["cuda"].cpu(), logits["cpu"], atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_decoding_equals_the_masked_full_cache(cuda, family, method, dtype):
    model, inputs = on(cuda, family, dtype)
    with kvcompress.compress(model, method, 0.3, **calibration_of(method, model)) as session:
        tokens, logits = generate(model, inputs, NEW)
    with only_attending_to(model, kept_of(session)):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    difference = (logits.float() - expected.float()).abs()
    assert difference.max() < (1e-3 if dtype == torch.float32 else 0.25)
    assert difference.mean() < (1e-4 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_one_is_bit_identical(cuda, family, dtype):
    model, inputs = on(cuda, family, dtype)
    tokens, expected = generate(model, inputs, NEW)
    with kvcompress.compress(model, "snapkv", 1.0):
        ours, logits = generate(model, inputs, NEW)
    assert torch.equal(ours, tokens)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("method", METHODS)
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
    with torch.device(cuda):
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

    full_cache = 2 * 16 * 32768 * 1024 * 2  # bytes: keys and values, layers, tokens, width, bf16
    peak("full", 1.0)  # warm-up: workspaces
    assert peak("full", 1.0) - peak(method, 0.1) > 0.7 * full_cache


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_offloaded_entries_are_not_on_the_device(cuda, kind):
    model, inputs = on(cuda, "qwen2", torch.float32)
    with kvcompress.compress(model, "snapkv", 0.3) as session:
        tokens, expected = generate(model, inputs, NEW)
    with kvcompress.compress(model, "snapkv", 0.3, max_new_tokens=NEW, cache_implementation=kind) as session:
        _, logits = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    for layer in session.cache.layers:
        assert all(tensor.device.type == "cpu" for tensor in layer.storage.tensors())


@pytest.mark.parametrize("method", ["snapkv", "pyramidkv", "full"])
def test_generate_compiles_static_decoding_by_itself_with_the_same_tokens(cuda, method):
    model, inputs = on(cuda, "qwen2", torch.float32)
    ratio = None if method == "full" else 0.3
    with kvcompress.compress(model, method, ratio, **calibration_of(method, model)):
        expected, _ = generate(model, inputs, 64)
    cache = kvcompress.CompressedCache(
        model.config, method, ratio, max_new_tokens=64, cache_implementation="static", **calibration_of(method, model)
    )
    torch._dynamo.utils.counters.clear()
    torch._dynamo.reset()
    with kvcompress.attach(model):
        tokens, _ = generate(model, inputs, 64, past_key_values=cache)
    assert torch.equal(tokens, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    del model._compiled_call


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_triton_kernel_equals_the_reference(cuda, dtype):
    pytest.importorskip("triton")
    check_triton(dtype, "cuda")
    check_turboquant_triton(dtype, "cuda")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_ragged_decoding_takes_as_many_splits_as_the_device_wants(cuda, dtype):
    """Long segments and few of them, short ones and many: what `ragged_decode` itself chooses."""
    for batch, kv_heads, most in ((1, 1, 9000), (2, 3, 700), (64, 8, 40)):
        *case, sizes = ragged_case(batch, kv_heads, 3, 64, most, 5, dtype, device=cuda)
        expected = ragged_decode_reference(*case, 0.125)
        output = ragged_decode(*case, sizes, 0.125)
        torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_benchmarked_ways_of_ragged_decoding_are_right(cuda, dtype):
    case = benchmark_case(4, 6, 2, 64, 300, device=cuda, dtype=dtype)
    arguments = [case[name] for name in ("query", "keys", "values", "starts", "lengths")]
    expected = ragged_decode_reference(*arguments, 0.125)
    for name, attend in ways_to_attend(case).items():
        if name != "uniform":
            torch.testing.assert_close(attend(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], msg=name)
