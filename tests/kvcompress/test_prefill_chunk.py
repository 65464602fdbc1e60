"""Prompts in chunks: right at every chunk, exact in what is kept, bounded in memory, the same in any batch."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import kvcompress
from kvcompress.errors import KVCompressError
from kvcompress.policy import make_policy
from tests.families import FAMILIES, VLM_FAMILIES
from tests.masked_reference import generate, only_attending_to

from .strategies import METHODS, Case, cases

NEW = 4
TOLERANCE = 1e-4  # fp32, logits of order 1
property_test = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
WHOLE_PROMPT_METHODS = {"kvzip", "sagekv"}


def takes_chunks(method: str, **options: object) -> bool:
    return method not in WHOLE_PROMPT_METHODS and not make_policy(method, 0.5, **options).layer_budget.is_measured


@st.composite
def chunked_cases(draw: st.DrawFn, family: str, **kwargs) -> Case:
    case = draw(cases(family, **kwargs))
    assume(takes_chunks(case.method, **dict(case.options)))
    return case


sizes = st.sampled_from([7, 20])
budgets = st.sampled_from([{}, {"ratio": None, "budget": 5}, {"ratio": None, "budget": 17}])


def kept_of(cache: kvcompress.CompressedCache) -> list:
    return [cache.kept_indices(layer) for layer in range(len(cache.layers))]


def real_lengths(inputs: dict) -> list[int]:
    return inputs["attention_mask"].sum(1).tolist()


@contextmanager
def notes_after_each_chunk(session: kvcompress.Session) -> Iterator[dict[int, list]]:
    """Columns seen -> what the cache held, [layer][row][kv_head], after each pass of the text decoder."""
    history = {}

    def note(decoder, args, output):
        cache = session.cache
        history[cache.seen_tokens] = kept_of(cache)

    handle = kvcompress.hook.text_decoder(session.model).register_forward_hook(note)
    try:
        yield history
    finally:
        handle.remove()


@contextmanager
def attending_chunk_by_chunk(model: torch.nn.Module, history: dict[int, list], columns: int) -> Iterator[None]:
    """Inside, one ordinary pass over a prompt of `columns` is what a chunked one should be: a query sees what was kept
    when its chunk began and, causally, its own chunk. Plain fp32 attention at the whole prompt's own positions."""
    ends = sorted(seen for seen in history if seen <= columns)

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        visible = torch.zeros(*key.shape[:3], columns, dtype=torch.bool).transpose(2, 3)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            visible[:, :, start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
            for row, heads in enumerate(history[start][module.layer_idx] if start else []):
                for head, held in enumerate(heads):
                    visible[row, head, start:end, held] = True
        if attention_mask is not None:
            visible = visible & attention_mask
        visible = visible | torch.eye(columns, dtype=torch.bool)  # pads: no NaN
        groups = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
        weights = logits.masked_fill(~visible.repeat_interleave(groups, 1), float("-inf")).softmax(-1)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    AttentionInterface.register("chunk_reference", attention)
    AttentionMaskInterface.register("chunk_reference", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config._attn_implementation = "chunk_reference"
    try:
        yield
    finally:
        config._attn_implementation = before


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_each_chunk_sees_what_was_kept_before_it_at_the_true_positions(family, data):
    case, size, changes = data.draw(chunked_cases(family)), data.draw(sizes), data.draw(budgets)
    inputs = case.inputs
    with case.compress(prefill_chunk=size, **case.unmerged, **changes) as session, torch.no_grad():
        with notes_after_each_chunk(session) as history:
            logits = case.model(**inputs).logits
    columns = inputs["input_ids"].shape[1]
    assert sorted(history) == list(range(columns, 0, -size))[::-1]
    with attending_chunk_by_chunk(case.model, history, columns), torch.no_grad():
        expected = case.model(**inputs, use_cache=False).logits
    assert logits.shape[1] == min(size, columns)
    torch.testing.assert_close(logits[:, -1], expected[:, -1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_every_layer_and_head_stores_exactly_its_budget_after_each_chunk(family, data):
    case, size, changes = data.draw(chunked_cases(family)), data.draw(sizes), data.draw(budgets)
    inputs = case.inputs
    budget = kvcompress.Budget(changes.get("ratio", case.ratio), changes.get("budget"))
    with case.compress(prefill_chunk=size, **changes) as session, notes_after_each_chunk(session) as history:
        generate(case.model, inputs, 1)
    columns = inputs["input_ids"].shape[1]
    for seen, layers in history.items():
        tokens = [max(length - columns + seen, 0) for length in real_lengths(inputs)]
        wanted = [budget(n) if n else 0 for n in tokens]
        counts = [[[len(head) for head in row] for row in layer] for layer in layers]
        if not case.is_uniform:
            totals = [sum(sum(layer[row]) for layer in counts) for row in range(len(wanted))]
            assert totals == [3 * case.heads[1] * n for n in wanted]
        elif case.is_adaptive:
            assert [[sum(row) for row in layer] for layer in counts] == [[case.heads[1] * n for n in wanted]] * 3
        else:
            assert counts == [[[n] * case.heads[1] for n in wanted]] * 3
    ratios = [n / length for n, length in zip(wanted, real_lengths(inputs), strict=True)]
    if case.is_uniform:
        assert all(layer == pytest.approx(ratios) for layer in session.cache.realised_ratios())


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_a_row_does_not_depend_on_its_batch_or_padding(family, data):
    case, size, changes = data.draw(chunked_cases(family)), data.draw(sizes), data.draw(budgets)
    assume(not case.may_tie)
    inputs = case.inputs
    columns = inputs["input_ids"].shape[1]
    with case.compress(prefill_chunk=size, **changes) as session:
        tokens, logits = generate(case.model, inputs, NEW)
    batch = kept_of(session.cache)
    for row, length in enumerate(real_lengths(inputs)):
        with case.compress(prefill_chunk=size, **changes) as session:
            _, alone = generate(case.model, case.family.solo(inputs, row), NEW, forced=tokens[row : row + 1])
        torch.testing.assert_close(logits[row], alone[0], atol=TOLERANCE, rtol=0)
        for together, solo in zip(batch, kept_of(session.cache), strict=True):
            for a, b in zip(together[row], solo[0], strict=True):
                assert (a - (columns - length)).tolist() == b.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@property_test
@given(data=st.data())
def test_decoding_goes_on_from_what_the_last_chunk_left(family, data):
    case, size = data.draw(chunked_cases(family)), data.draw(sizes)
    with case.compress(prefill_chunk=size, **case.unmerged) as session:
        tokens, logits = generate(case.model, case.inputs, NEW)
    # The keys of later chunks depend on what was kept of earlier ones, so the reference needs the chunked prompt, too.
    columns = case.inputs["input_ids"].shape[1]
    with case.compress(prefill_chunk=size, **case.unmerged) as session, notes_after_each_chunk(session) as history:
        first, _ = generate(case.model, case.inputs, 1)
    assert torch.equal(first, tokens[:, :1])
    assert max(history) == columns
