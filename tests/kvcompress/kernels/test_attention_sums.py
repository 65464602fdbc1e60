"""A prompt's attention that notes its column sums on the way is the attention, and they are the sums."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress.hooks import attention
from kvcompress.kernels import attention_sums, column_sums
from kvcompress.kernels.attention_sums import attention_with_sums
from tests.support.examples import examples
from tests.support.families import FAMILIES


@examples(60)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    columns=st.integers(1, 60),
    head_dim=st.sampled_from([16, 33]),
    rows=st.sampled_from([1, 7, 192]),
    seed=st.integers(0, 1000),
)
def test_output_and_sums_are_those_of_plain_attention(batch, kv_heads, groups, columns, head_dim, rows, seed):
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, kv_heads * groups, columns, head_dim, generator=draw)
    key, value = torch.randn(2, batch, kv_heads, columns, head_dim, generator=draw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_sums, "ROWS", rows)
        output, sums = attention_with_sums(query, key, value, 0.3)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(output, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums, column_sums.column_sums_reference(query, key, 0.3), atol=1e-5, rtol=1e-5)


def spied(monkeypatch, on: bool) -> list[str]:
    """What made column sums from now on; `on`: whether the attention may."""
    made = []
    on_the_way, afterwards = attention.attention_with_sums, column_sums.column_sums_blocked
    monkeypatch.setattr(
        attention, "attention_with_sums", lambda *given: made.append("on the way") or on_the_way(*given)
    )
    monkeypatch.setattr(
        column_sums, "column_sums_blocked", lambda *given: made.append("afterwards") or afterwards(*given)
    )
    if not on:
        monkeypatch.setattr(attention, "can_compute_sums", lambda *given: False)
    return made


@pytest.mark.parametrize("family", ["qwen2", "llava-onevision", "qwen2-vl"])
@pytest.mark.parametrize("options", [{}, {"decode_ratio": 0.5}], ids=["prompt", "decode"])
def test_kept_sets_and_logits_do_not_depend_on_where_the_sums_are_made(family, options, monkeypatch):
    model = FAMILIES[family].build()
    inputs = FAMILIES[family].inputs(model, [40, 40])
    inputs.pop("attention_mask", None)
    outcomes = []
    for on in (True, False):
        if hasattr(model.base_model, "rope_deltas"):  # of a generation before
            model.base_model.rope_deltas = None
        with monkeypatch.context() as patch:
            made = spied(patch, on)
            with kvcompress.compress(model, "h2o", 0.4, **options) as session, torch.no_grad():
                logits = [model(**inputs).logits[:, -1]]
                for _ in range(3):
                    logits.append(model(logits[-1].argmax(-1)[:, None], past_key_values=session.cache).logits[:, -1])
        layers = len(session.cache.compressed_layers)
        assert made[:layers] == ["on the way" if on else "afterwards"] * layers
        assert "afterwards" not in made or not on
        kept = [session.cache.kept_indices(layer.layer_idx) for layer in session.cache.compressed_layers]
        outcomes.append((torch.stack(logits), kept))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], atol=1e-4, rtol=1e-4)
    for with_it, without in zip(outcomes[0][1], outcomes[1][1], strict=True):
        assert all(
            torch.equal(*heads) for rows in zip(with_it, without, strict=True) for heads in zip(*rows, strict=True)
        )


def test_padding_half_precision_and_other_attention_take_the_base_and_the_sums_afterwards(monkeypatch):
    family = FAMILIES["qwen2"]
    made = spied(monkeypatch, on=True)

    def run(model, lengths: list[int], method: str) -> set[str]:
        made.clear()
        with kvcompress.compress(model, method, 0.4), torch.no_grad():
            model(**family.inputs(model, lengths))
        return set(made)

    model = copy.deepcopy(family.build())  # the tests share one
    assert run(model, [40], "h2o") == {"on the way"}
    assert run(model, [40, 30], "h2o") == {"afterwards"}
    assert run(model, [40], "snapkv") == set()
    model.set_attn_implementation("eager")
    assert run(model, [40], "h2o") == {"afterwards"}
    model.set_attn_implementation("sdpa")
    assert run(model.to(torch.bfloat16), [40], "h2o") == {"afterwards"}


def test_noted_sums_are_only_used_for_the_keys_and_scaling_they_are_of():
    query, key = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16)
    query.column_sums = column_sums.Noted(key, 0.25, torch.full((1, 2, 20), 7.0))
    assert (column_sums.column_sums(query, key, 0.25) == 7).all()
    for other in ((key.clone(), 0.25), (key, 0.5), (key[:, :, :19], 0.25)):
        assert (column_sums.column_sums(query[:, :, : other[0].shape[2]], *other) != 7).all()
    query.column_sums = column_sums.Noted(key, 0.25, torch.full((1, 2, 20), 7.0))
    assert (column_sums.column_sums(query, key, 0.5) != 7).all()
    weights = torch.ones(1, 20, dtype=torch.bool)
    assert (column_sums.column_sums(query, key, 0.25, weights=weights) != 7).all()
