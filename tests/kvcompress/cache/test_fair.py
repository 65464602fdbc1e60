"""`fair=`: each span of a prompt keeps the same share of what may be evicted, inside the budget, in any batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.errors import KVCompressError
from kvcompress.policy.spans import Spans
from kvcompress.scoring.selection import fair_scores, top_indices
from tests import fuzz
from tests.kvcompress.cache.test_protect import chooses_by_scores
from tests.kvcompress.cache.test_protect import config as configured
from tests.support.examples import examples, some
from tests.support.fair import checked_choices, fair_choice
from tests.support.families import FAMILIES
from tests.support.kept import kept_of
from tests.support.strategies import METHODS, SOME_METHODS

QWEN2 = FAMILIES["qwen2"]
FAIR = "first:9+tokens:12-20+last:7"


def config(method: str, **options: object) -> dict:
    return configured(method, **{"fair": FAIR, "ratio": 0.4, "head_budget": "uniform", **options})


@pytest.mark.parametrize("method", some(filter(chooses_by_scores, METHODS), SOME_METHODS))
def test_each_choice_of_every_method_is_fair_in_any_batch_and_in_flight(method):
    fuzz.check(config(method))  # which compares each choice with plain Python


@pytest.mark.parametrize(
    "options",
    [
        {"head_budget": "shared"},
        {"layer_budget": "pyramid"},
        {"layer_budget": "attention-entropy"},
        {"scope": "context", "context_tokens": 30},
        {"ratio_of": "vision"},
        {"protect": "first:4+last:2"},
        {"decode_ratio": 0.3, "decode_interval": 2},
        {"merge": "average"},
        {"cache_implementation": "quantized", "kv_backend": "fp8"},
    ],
    ids=str,
)
def test_choices_are_fair_whatever_else_is_asked(options):
    fuzz.check({**config("snapkv", window_size=4, **options), "slots": 0})  # in flight: each method, above


def test_spans_that_a_method_would_forget_keep_their_share():
    """StreamingLLM keeps nothing but the end. Its last token stays whatever the shares."""
    model = QWEN2.build()
    inputs = QWEN2.inputs(model, [60])
    shares = (*range(13, 20), *range(34, 40), *range(53, 60))
    for fair, expected in ((None, tuple(range(40, 60))), ("tokens:0-20+tokens:20-40", shares)):
        with kvcompress.compress(model, "streamingllm", 1 / 3, sinks=0, fair=fair) as session:
            generate(model, inputs, 1)
        kept = [head for layer in kept_of(session.cache) for head in layer[0]]
        assert {tuple(head.tolist()) for head in kept} == {expected}


@examples(60)
@given(data=st.data())
def test_shares_are_those_of_plain_python(data):
    """Ties, entries that must stay, groups that are empty, budgets without room and pads among them."""
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    columns, count = max(lengths), data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    scores = torch.randint(-3, 6, (len(lengths), 2, columns), generator=generator).float()
    scores = scores.masked_fill(scores == 5, torch.inf)
    groups = torch.randint(0, count, (len(lengths), columns), generator=generator)
    budgets = [data.draw(st.integers(1, length)) for length in lengths]
    pads = columns - torch.tensor(lengths)[:, None]
    padding = None if min(lengths) == columns else pads
    kept = top_indices(fair_scores(scores, groups, count, budgets, padding), budgets, padding)
    for row, first in enumerate(pads[:, 0].tolist()):
        for head in range(2):
            of_row = scores[row, head, first:].tolist(), groups[row, first:].tolist()
            found = [column - first for column in kept[row, head].tolist() if column >= 0]
            assert found == fair_choice(*of_row, count, budgets[row])


def test_pads_do_not_move_the_spans():
    spans = Spans.parse_apart("first:2+tokens:4-6+last:3")
    assert spans.groups([9, 10], 10).tolist() == [[0, 1, 1, 0, 0, 2, 2, 3, 3, 3], [1, 1, 0, 0, 2, 2, 0, 3, 3, 3]]


def test_a_later_prompt_and_a_decode_step_have_no_spans():
    model = QWEN2.build()
    first, second = (QWEN2.inputs(model, [30], seed=seed)["input_ids"] for seed in (1, 2))
    options = {"decode_budget": 14, "decode_interval": 1, "sinks": 0}
    with checked_choices() as made, kvcompress.compress(model, "streamingllm", 0.4, fair="first:10", **options):
        cache = model(first, use_cache=True).past_key_values
        model(second[:, :1], past_key_values=cache)
        assert made == [12] * 3
        model(second, past_key_values=cache)
    assert made == [12] * 3


@pytest.mark.parametrize(
    ("fair", "said"),
    [
        ("tokens:10-21", "fair='tokens:10-21' is not in the prompt of row 0, which has 20 tokens"),
        ("tokens:5-16+last:5", "fair=: last shares tokens with another span in row 0, whose prompt has 20 tokens"),
    ],
)
def test_spans_that_do_not_fit_a_prompt_are_refused(fair, said):
    model = QWEN2.build()
    with pytest.raises(KVCompressError, match=said), kvcompress.compress(model, "snapkv", 0.5, fair=fair):
        model.generate(**QWEN2.inputs(model, [20]), max_new_tokens=2)


def test_a_method_that_ranks_twice_shares_out_all_but_its_window():
    model = QWEN2.build()
    with kvcompress.compress(model, "csp", 0.4, cross=0.0, recent=0.1, fair="first:30") as session:
        generate(model, QWEN2.inputs(model, [60]), 1)
    for heads in (layer[0] for layer in kept_of(session.cache)):
        assert [int((head < 30).sum()) for head in heads] == [11, 11]  # of 22 beside the window of two
