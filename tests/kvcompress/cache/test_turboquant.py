"""kv_backend=turboquant: few bits, packed once, attended to as they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress.cache.storage.ragged import RaggedStorage
from kvcompress.check.reference import generate
from kvcompress.kernels.turboquant import BITS, TurboQuant, codebook, codec
from tests.support.calibrations import calibration_of
from tests.support.examples import examples, paired, some
from tests.support.families import FAMILIES
from tests.support.strategies import METHODS, SOME_METHODS

MODEL = FAMILIES["qwen2"].build()
CPU = torch.device("cpu")


def packed(bits: int) -> dict[str, object]:
    return {"cache_implementation": "quantized", "kv_backend": "turboquant", "kv_bits": bits}


# -- the code of a vector


@pytest.mark.parametrize(("bits", "error"), [(2, 0.117), (3, 0.034), (4, 0.0095)])
def test_the_error_of_a_unit_vector_is_the_papers(bits, error):
    """Theorem 1: 0.117, 0.03 and 0.009 (its last digits from the codebooks of a normal distribution)."""
    codec = TurboQuant(512, bits, CPU)
    vectors = torch.nn.functional.normalize(torch.randn(4000, 512, generator=torch.Generator().manual_seed(0)), dim=-1)
    again = codec.rotate_back(codec.unpack(codec.pack(vectors), torch.float32))
    assert ((vectors - again) ** 2).sum(-1).mean() == pytest.approx(error, rel=0.02)


def test_a_codebook_is_that_of_a_normal_distribution_where_dim_is_large():
    """Lloyd-Max for a standard normal distribution (Max 1960, table I)."""
    assert (codebook(2048, 2) * 2048**0.5).tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=2e-3)


@pytest.mark.parametrize("bits", BITS)
def test_each_number_of_a_codebook_is_the_mean_of_what_is_nearest_to_it(bits):
    sample = torch.nn.functional.normalize(torch.randn(60_000, 64, generator=torch.Generator().manual_seed(1)), dim=-1)
    numbers = codebook(64, bits)
    nearest = (sample[..., :8, None] - numbers).abs().argmin(-1)
    for number, value in enumerate(numbers.tolist()):
        assert sample[..., :8][nearest == number].mean().item() == pytest.approx(value, abs=2e-3)


def test_a_rotation_that_inference_mode_was_the_first_to_need_serves_gradients_later():
    with torch.inference_mode():
        shared = codec(11, 4, CPU)  # a size that no other test has
    queries = torch.randn(3, 11, requires_grad=True)
    shared.rotate_back(shared.rotate(queries)).sum().backward()
    torch.testing.assert_close(queries.grad, torch.ones(3, 11))


@examples(40)
@given(
    dim=st.integers(2, 130),
    bits=st.sampled_from(BITS),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_vector_comes_back_with_its_norm_and_about_its_direction(dim, bits, scale, dtype):
    codec = TurboQuant(dim, bits, CPU)
    vectors = (scale * torch.randn(3, 2, dim, generator=torch.Generator().manual_seed(dim))).to(dtype)
    bytes_ = codec.pack(vectors)
    assert bytes_.shape == (3, 2, codec.nbytes)
    assert bytes_.dtype == torch.uint8
    again = codec.rotate_back(codec.unpack(bytes_, torch.float32))
    relative = (again - vectors).norm(dim=-1) / vectors.float().norm(dim=-1)
    assert relative.max() < {2: 0.75, 3: 0.6, 4: 0.5}[bits]  # of few numbers some are far out
    assert torch.equal(codec.pack(vectors[:, :1]), bytes_[:, :1])  # a vector's bytes are its own


def test_a_vector_of_zeros_and_one_beyond_fp16_stay_finite():
    codec = TurboQuant(16, 2, CPU)
    vectors = torch.stack([torch.zeros(16), torch.full((16,), 1e6)])
    assert codec.unpack(codec.pack(vectors), torch.float32).isfinite().all()
    assert (codec.unpack(codec.pack(vectors), torch.float32)[0] == 0).all()


# -- in the cache


@pytest.mark.parametrize(("method", "family"), some(paired([*METHODS, "full"], list(FAMILIES)), SOME_METHODS))
def test_a_step_attends_to_what_reading_the_entries_gives(method, family, monkeypatch):
    model = FAMILIES[family].build()
    inputs = FAMILIES[family].inputs(model, [45, 29], [1, 0] if FAMILIES[family].is_vlm else None)
    ratio = None if method == "full" else 0.4
    with kvcompress.compress(model, method, ratio, **packed(4), **calibration_of(method, model)):
        tokens, in_place = generate(model, inputs, 6)
    monkeypatch.setattr("kvcompress.cache.storage.turboquant.TurboQuantStorage.decodes_in_place", False)
    with kvcompress.compress(model, method, ratio, **packed(4), **calibration_of(method, model)):
        _, read = generate(model, inputs, 6, forced=tokens)
    torch.testing.assert_close(in_place, read, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_the_codes_and_a_norm_per_vector(bits):
    inputs = FAMILIES["qwen2"].inputs(MODEL, [600])
    with kvcompress.compress(MODEL, max_new_tokens=0, **packed(bits)) as session:
        MODEL(**inputs)
    vectors = 3 * 2 * 2 * 600  # layers, keys and values, KV heads, tokens
    assert session.cache.nbytes - session.cache.room_nbytes == vectors * (16 * bits // 8 + 2)


def test_heads_that_keep_different_numbers_have_no_padding():
    with kvcompress.compress(MODEL, "adakv", 0.5, window_size=4, max_new_tokens=8, **packed(4)) as session:
        generate(MODEL, FAMILIES["qwen2"].inputs(MODEL, [200, 90]), 5)
    inner = session.cache.layers[0].storage.inner
    assert isinstance(inner, RaggedStorage)
    held = sum(len(head) for row in session.cache.kept_indices(0) for head in row)
    assert len(inner.keys) == held + inner.room * inner.counts.numel()
