"""Packed entries on a CPU: the compiled kernels equal the plain reference, and without a compiler that takes over."""

import ctypes
import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.cache.storage.dense import DenseStorage
from kvcompress.cache.storage.turboquant import TurboQuantStorage
from kvcompress.kernels import compiled, packed, turboquant_cpu
from kvcompress.kernels.ragged_decode import ragged_decode_reference
from kvcompress.kernels.turboquant import BITS, TurboQuant, codec
from tests.support.examples import examples
from tests.support.ragged_cases import TOLERANCE, ragged_case

CPU = torch.device("cpu")
DIMS = st.sampled_from([2, 16, 33, 64, 80, 128, 200])


@pytest.fixture(scope="module")
def kernels():
    if turboquant_cpu.kernels() is None:
        pytest.skip("no C++ compiler")


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """As on a machine without one, where nothing was compiled before."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(turboquant_cpu, "library", cache(compiled.library.__wrapped__))
    monkeypatch.setattr(turboquant_cpu, "kernels", cache(turboquant_cpu.kernels.__wrapped__))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def rotated(stored: torch.Tensor, by: TurboQuant, dtype: torch.dtype) -> torch.Tensor:
    return by.rotate_back(by.unpack(stored, torch.float32)).to(dtype)


@examples(40)
@given(
    key_dim=DIMS,
    value_dim=DIMS,
    bits=st.sampled_from(BITS),
    new=st.sampled_from([1, 3, 60]),
    dtype=st.sampled_from(list(TOLERANCE)),
    scale=st.sampled_from([0.0, 1e-7, 1.0, 1e6]),
    seed=st.integers(0, 1000),
)
def test_a_packed_token_is_the_references_but_for_rounding(kernels, key_dim, value_dim, bits, new, dtype, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([3, 90, 170, 500])  # of two rows and two KV heads
    codecs = codec(key_dim, bits, CPU), codec(value_dim, bits, CPU)
    parts = [
        (scale * torch.randn(2, 2, new, each.dim, generator=generator)).clamp(-6e4, 6e4).to(dtype) for each in codecs
    ]
    stored = [torch.full((600, each.nbytes), 7, dtype=torch.uint8) for each in codecs]
    packed.pack_behind(*stored, ends - 3, 3, *parts, codecs)
    rows = (ends[:, None] + torch.arange(new)).flatten()
    others = torch.ones(600, dtype=torch.bool)
    others[rows] = False
    for part, each, found in zip(parts, codecs, stored, strict=True):
        assert (found[others] == 7).all()
        expected = each.pack(part).flatten(0, 2)
        norms = [bytes_[:, each.code_bytes :].clone().view(torch.float16).float() for bytes_ in (found[rows], expected)]
        torch.testing.assert_close(*norms, rtol=1e-3, atol=6e-8)
        # A code differs only where the number is halfway between two of the codebook.
        codes = []
        for bytes_ in (found[rows], expected):
            bytes_[:, each.code_bytes :] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
            codes.append(each.unpack(bytes_, torch.float32))
        vectors = part.float().flatten(0, 2)
        unit = each.rotate(vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny))
        to_boundary = (unit[..., None] - each.boundaries).abs().amin(-1)
        assert to_boundary[codes[0] != codes[1]].le(1e-5).all()


@examples(60)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 9),
    dim=DIMS,
    bits=st.sampled_from(BITS),
    most=st.sampled_from([1, 5, 128, 700]),
    spare=st.integers(0, 9),
    dtype=st.sampled_from(list(TOLERANCE)),
    count=st.sampled_from([1, 3]),
    seed=st.integers(0, 1000),
)
def test_attention_over_packed_segments_is_the_references(
    kernels, threads, batch, kv_heads, groups, dim, bits, most, spare, dtype, count, seed
):
    threads(count)
    query, keys, values, starts, lengths, sizes = ragged_case(batch, kv_heads, groups, dim, most, spare, dtype, seed)
    by, unused = codec(dim, bits, CPU), keys.isnan().all(1)
    stored = [by.pack(part.nan_to_num()) for part in (keys, values)]
    unpacked = [rotated(part, by, torch.float32) for part in stored]
    for part in stored:
        part[unused] = 255  # not a number
    expected = ragged_decode_reference(query.float(), *unpacked, starts, lengths, dim**-0.5)
    output = packed.packed_decode(query, *stored, starts, lengths, max(sizes[::2]), None, (by, by), dim**-0.5)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@examples(12)
@given(
    dims=st.tuples(DIMS, DIMS),
    bits=st.sampled_from(BITS),
    entries=st.sampled_from([40, 300, 900]),
    shown=st.floats(0.02, 1.0),
    count=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_pads_that_are_stored_are_not_attended_to(kernels, threads, dims, bits, entries, shown, count, seed):
    threads(count)
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 3, entries, dim, generator=generator) for dim in dims)
    pads = torch.rand(2, entries, generator=generator) > shown
    pads[0, : entries // 2] = True  # whole blocks
    storage = TurboQuantStorage(keys, values, None, pads, bits, 1, None)
    storage.append(*(torch.randn(2, 3, 1, dim, generator=generator) for dim in dims))
    query = torch.randn(2, 12, 1, dims[0], generator=generator)
    read = [part.repeat_interleave(4, 1) for part in storage.read()]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *read, storage.visible()[:, :, None], scale=0.2)
    torch.testing.assert_close(storage.decode(query, 0.2), expected, atol=1e-5, rtol=1e-4)


def test_far_apart_logits_are_weighed_as_by_the_reference(kernels):
    by = codec(64, 4, CPU)
    keys, values = torch.randn(2, 1, 1, 1000, 64, generator=torch.Generator().manual_seed(0))
    storage = TurboQuantStorage(30 * keys, values, None, None, 4, 1, None)
    query = 30 * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(1))
    read = [part.flatten(0, 2) for part in storage.read()]
    starts, lengths = torch.tensor([[0]]), torch.tensor([[1000]])
    expected = ragged_decode_reference(query, *read, starts, lengths, 1.0)
    torch.testing.assert_close(storage.decode(query, 1.0), expected, atol=1e-3, rtol=1e-3)
    assert by is storage.codecs[0]


def test_a_token_written_without_a_compiler_is_read_with_one(kernels, no_compiler, monkeypatch):
    """Both ways keep the same bytes, and a step is the same."""
    generator = torch.Generator().manual_seed(3)
    keys, values, new = (torch.randn(2, 2, n, 64, generator=generator) for n in (150, 150, 1))
    query = torch.randn(2, 6, 1, 64, generator=generator)
    plain = TurboQuantStorage(keys, values, None, None, 3, 4, None)
    plain.append(new, new)
    output = plain.decode(query, 0.125)
    assert not packed.has_kernels(CPU)
    monkeypatch.undo()
    assert packed.has_kernels(CPU)
    torch.testing.assert_close(plain.decode(query, 0.125), output, atol=1e-5, rtol=1e-4)


def test_without_a_compiler_one_line_says_so_and_plain_torch_attends(no_compiler, caplog):
    keys = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    storage = TurboQuantStorage(keys, keys, None, None, 4, 4, None)
    storage.append(keys[:, :, :1], keys[:, :, :1])
    query = torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(1))
    plain = DenseStorage(*storage.read(), None, None, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(query, *plain.read(), scale=0.25, enable_gqa=True)
    torch.testing.assert_close(storage.decode(query, 0.25), expected, atol=1e-5, rtol=1e-4)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "kvcompress"]
    assert "plain torch" in said
    assert "no-such-compiler" in said


def test_a_compiler_that_fails_is_quoted(no_compiler, monkeypatch, tmp_path, caplog):
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    assert turboquant_cpu.kernels() is None
    assert "it is broken" in caplog.text
    assert not any((tmp_path / "cache" / "kvcompress").iterdir())


def test_kernels_are_compiled_once_and_then_found(kernels, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    made = compiled._built(source)
    assert made.parent == tmp_path / "kvcompress"
    assert [record.name for record in caplog.records] == ["kvcompress"]
    assert compiled._built(source) == made
    assert len(caplog.records) == 1
    source.write_text('extern "C" int answer() { return 43; }\n')
    other = compiled._built(source)
    assert other != made
    (tmp_path / "small.h").write_text("// compiled with it\n")
    assert compiled._built(source) not in (made, other)


def test_two_that_compile_at_once_leave_one_whole_library(kernels, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(compiled._built, [source] * 4))
    (library,) = made
    assert ctypes.CDLL(str(library)).answer() == 42
    assert list(library.parent.iterdir()) == [library]
