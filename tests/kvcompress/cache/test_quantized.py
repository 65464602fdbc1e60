"""Evict, then quantize: few bits, quantized once, close to full precision."""

from functools import cache

import pytest
import torch

import kvcompress
from kvcompress.cache.storage.quantized import QuantizedStorage
from kvcompress.check.reference import generate
from kvcompress.kernels import compiled, grouped, grouped_cpu
from kvcompress.kernels.quantization import BITS, PACKAGES, Quantizer, unpacked
from kvcompress.scoring.layer_view import Kept
from tests.support.families import FAMILIES
from tests.support.grouped_cases import check_hqq

pytest.importorskip("hqq", reason="pip install -e .[quantized]")
cpp = pytest.importorskip("optimum.quanto.library.extensions.cpp", reason="pip install -e .[quantized]")

ALL = [(backend, bits) for backend in PACKAGES for bits in BITS[backend]]
EIGHT = {"cache_implementation": "quantized", "kv_backend": "hqq", "kv_bits": 8, "kv_group_size": 16}
MODEL = FAMILIES["qwen2"].build()


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS["quanto"])
def test_quantos_compiled_operator_unpacks_the_same(bits):
    packed = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 3).contiguous()
    assert torch.equal(cpp.ext.lib.unpack(packed, bits), unpacked(packed, bits))


@pytest.mark.parametrize("bits", BITS["hqq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hqqs_numbers_scales_and_zeros_are_those_of_its_own_quantizer(bits, dtype):
    check_hqq(bits, dtype, torch.device("cpu"))


@pytest.mark.parametrize(("backend", "bits"), ALL)
@pytest.mark.parametrize("shape", [(5, 7), (64, 16), (1, 1), (3, 100)])
def test_the_error_is_at_most_a_step_of_the_groups_range(backend, bits, shape):
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed = Quantizer(backend, bits, 16).quantize(states)
    assert packed.dequantize().shape == states.shape
    step = (states.max() - states.min()) / (2**bits - 1)
    assert (packed.dequantize() - states).abs().max() <= step * (1.5 if bits > 1 else 2)


@pytest.mark.parametrize(("backend", "bits"), ALL)
def test_what_fills_the_last_group_up_does_not_widen_its_range(backend, bits):
    states = 30 + torch.randn(35, generator=torch.Generator().manual_seed(0))
    step = (states.max() - states.min()) / (2**bits - 1)
    assert (Quantizer(backend, bits, 16).quantize(states).dequantize() - states).abs().max() <= step * 1.5


@pytest.mark.parametrize("backend", PACKAGES)
def test_a_backend_that_is_not_installed_is_an_error_that_says_how(backend, monkeypatch):
    Quantizer(backend, 4, 16).check()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(kvcompress.KVCompressError, match=f"kv_backend='{backend}' is not installed: pip install"):
        Quantizer(backend, 4, 16).check()


@pytest.mark.parametrize(("backend", "bits"), ALL)
def test_bytes_fall_with_the_bits(backend, bits):
    inputs = FAMILIES["qwen2"].inputs(MODEL, [600])
    arguments = {"cache_implementation": "quantized", "kv_backend": backend, "kv_bits": bits, "kv_residual": 1}
    with kvcompress.compress(MODEL, **arguments) as session:
        generate(MODEL, inputs, 1)
    numbers = 3 * 2 * 600 * 2 * 16  # layers, keys and values, tokens, KV heads, head_dim
    scales = numbers / 64 * 2 * 4
    residual = 3 * 2 * 2 * 16 * 4
    assert session.cache.nbytes == pytest.approx(numbers * bits / 8 + scales + residual, rel=0.02)


@pytest.mark.parametrize("backend", PACKAGES)
def test_a_row_that_holds_nothing_has_one_group(backend):
    packed = Quantizer(backend, 4, 16).quantize(torch.empty(0, 16))
    assert packed.dequantize().shape == (0, 16)


def test_beams_share_the_bytes_of_quantized_rows():
    inputs = FAMILIES["qwen2"].inputs(MODEL, [40])
    with kvcompress.compress(MODEL, "knorm", 0.5, **EIGHT, kv_residual=1) as session:
        generate(MODEL, inputs, 1)
        memory = session.cache.compressed_layers[0].memory
        before, blocks = memory.nbytes, sum(part.nbytes for part in memory.storage.blocks[0].tensors())
        session.cache.batch_repeat_interleave(4)
        assert memory.nbytes - before < blocks


def test_entries_are_quantized_once(monkeypatch):
    quantized = []
    monkeypatch.setattr(
        Quantizer, "quantize", lambda self, states, original=Quantizer.quantize: (
            quantized.append(states.numel()) or original(self, states)
        )
    )  # fmt: skip
    cache = kvcompress.CompressedCache(MODEL.config, "snapkv", 0.5, kv_residual=4, **EIGHT)
    with kvcompress.attach(MODEL):
        generate(MODEL, {"input_ids": torch.arange(10, 50)[None]}, 12, past_key_values=cache)
        MODEL(torch.arange(50, 60)[None], past_key_values=cache)
        generate(MODEL, {"input_ids": torch.arange(10, 80)[None]}, 6, past_key_values=cache)
    waiting = cache.layers[0].storage.recent.length
    held = sum(len(head) for head in cache.kept_indices(0)[0]) - 2 * waiting
    assert sum(quantized) == 3 * 2 * held * 16


def test_a_token_that_is_fed_again_leaves_the_others_as_they_are():
    cache = kvcompress.CompressedCache(MODEL.config, "snapkv", 0.5, first_token="compressed", **EIGHT)
    with kvcompress.attach(MODEL), torch.no_grad():
        MODEL(torch.arange(10, 80)[None], past_key_values=cache)
    assert len(cache.layers[0].storage.blocks) == 1
    assert cache.layers[0].storage.recent.length == 1


def test_decoded_tokens_wait_in_full_precision_until_there_are_kv_residual_of_them():
    cache = kvcompress.CompressedCache(MODEL.config, "snapkv", 0.5, kv_residual=3, **EIGHT)
    waiting, blocks = [], []
    with kvcompress.attach(MODEL), torch.no_grad():
        MODEL(torch.arange(10, 50)[None], past_key_values=cache)
        for token in range(50, 57):
            MODEL(torch.tensor([[token]]), past_key_values=cache)
            waiting.append(cache.layers[0].storage.recent.length)
            blocks.append(len(cache.layers[0].storage.blocks))
    assert waiting == [1, 2, 0, 1, 2, 0, 1]
    assert blocks == [1, 1, 2, 2, 2, 3, 3]


def filled(backend: str, bits: int, dtype: torch.dtype) -> QuantizedStorage:
    """Two rows of two KV heads that keep different numbers, a second prompt, a block of appended tokens, two more."""
    generator = torch.Generator().manual_seed(bits)

    def states(entries: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(2, 2, entries, dim, generator=generator).to(dtype) for dim in (24, 16))

    indices = torch.arange(90).expand(2, 2, -1).clone()
    indices[0, 1, :40] = indices[1, 0, :7] = -1
    storage = QuantizedStorage(*states(90), indices, None, Quantizer(backend, bits, 16), 5, None)
    storage.extend(Kept(*states(30), torch.arange(90, 120).expand(2, 2, -1)), 90)
    for _ in range(7):
        storage.append(*states(1))
    return storage


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("backend", PACKAGES)
def test_the_same_is_stored_whether_or_not_the_host_knows_how_much(backend, rows):
    states = torch.randn(2, rows, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    indices = torch.arange(40).expand(rows, 2, -1).clone()
    indices[0, 1, :25] = indices[-1, 0, :7] = -1
    found = []
    for totals in (None, (indices >= 0).sum((1, 2)).tolist()):
        storage = QuantizedStorage(*states, indices, None, Quantizer(backend, 4, 16), 5, totals)
        found.append((*storage.read(), storage.columns(40), storage.visible()))
    for unknown, known in zip(*found, strict=True):
        assert torch.equal(unknown, known)


def check_step(storage: QuantizedStorage, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(storage.recent.keys), 6, 1, 24, generator=generator).to(dtype)
    keys, values = (part.float().repeat_interleave(3, 1) for part in storage.read())
    mask = storage.visible().repeat_interleave(3, 1)[:, :, None]
    expected = torch.nn.functional.scaled_dot_product_attention(query.float(), keys, values, mask, scale=0.2)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(storage.decode(query, 0.2).float(), expected, atol=close, rtol=close)


@pytest.fixture
def kernels():
    if grouped_cpu.kernels() is None:
        pytest.skip("no C++ compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("backend", "bits"), ALL)
def test_a_step_attends_to_what_reading_the_entries_gives(kernels, backend, bits, dtype):
    storage = filled(backend, bits, dtype)
    assert storage.decodes_in_place
    check_step(storage, dtype)
    twin = storage.fork()
    for _ in range(5):
        twin.append(*(torch.ones(2, 2, 1, dim, dtype=dtype) for dim in (24, 16)))
    check_step(twin, dtype)  # a block more
    check_step(storage, dtype)
    storage.select(torch.tensor([1, 1, 0]))
    check_step(storage, dtype)
    again = QuantizedStorage.of_state(storage.state(), torch.device("cpu"))
    check_step(again, dtype)


def test_what_is_forgotten_is_read_under_a_mask(kernels):
    storage = filled("hqq", 4, torch.float32)
    storage.forget(119, 127)
    assert not storage.decodes_in_place
    assert storage.visible().sum() == 4 * 127 - 47 - 4


def test_without_a_compiler_entries_are_read_and_one_line_says_so(monkeypatch, tmp_path, caplog):
    inputs = FAMILIES["qwen2"].inputs(MODEL, [40])
    arguments = {"kv_residual": 2, **EIGHT}
    with kvcompress.compress(MODEL, "snapkv", 0.5, **arguments):
        tokens, expected = generate(MODEL, inputs, 6)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(grouped_cpu, "library", cache(compiled.library.__wrapped__))
    monkeypatch.setattr(grouped_cpu, "kernels", cache(grouped_cpu.kernels.__wrapped__))
    assert not grouped.has_kernels(torch.device("cpu"))
    with kvcompress.compress(MODEL, "snapkv", 0.5, **arguments):
        _, logits = generate(MODEL, inputs, 6, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "kvcompress"]
    assert "no-such-compiler" in said
