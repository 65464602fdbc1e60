"""DivPrune and CDPruner: vision tokens chosen by what their embeddings have in common."""

import itertools

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.tokens import Tokens
from kvcompress.tokens.cdpruner import most_diverse
from kvcompress.tokens.divprune import farthest_first
from kvcompress.tokens.vispruner import distinct
from tests.support.examples import paired
from tests.support.families import VLM_FAMILIES
from tests.support.token_methods import LENGTHS, as_hidden, batch, budget, entering, vision_of


def farthest(embeddings: torch.Tensor, count: int) -> list[int]:
    """Max-min diversity, greedily, over all pairs in float64."""
    states = torch.nn.functional.normalize(embeddings.double(), dim=-1)
    apart = (1 - states @ states.T).tolist()
    tokens = range(len(apart))
    chosen = [max(tokens, key=lambda i: min(apart[i][j] for j in tokens if j != i))]
    while len(chosen) < count:
        left = (i for i in tokens if i not in chosen)
        chosen.append(max(left, key=lambda i: min(apart[i][j] for j in chosen)))
    return chosen


def likeliest(embeddings: torch.Tensor, text: torch.Tensor, count: int) -> list[int]:
    """Greedy MAP of the conditional determinantal point process by its definition, the determinant, in float64."""
    states, asked = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (embeddings, text))
    relevance = (states @ asked.T).mean(1) if len(text) else torch.ones(len(states), dtype=torch.float64)
    low, high = relevance.min(), relevance.max()
    relevance = (relevance - low + 1e-6) / (high - low + 1e-6)
    kernel = relevance[:, None] * (states @ states.T) * relevance
    chosen = []
    while len(chosen) < count:
        left = [i for i in range(len(kernel)) if i not in chosen]
        chosen.append(max(left, key=lambda i: kernel[[*chosen, i]][:, [*chosen, i]].logdet().item()))
    return chosen


@pytest.mark.parametrize("method", ["divprune", "cdpruner"])
@pytest.mark.parametrize(("family", "ratio"), paired(list(VLM_FAMILIES), [0.2, 0.5]))
def test_they_keep_what_a_plain_reference_chooses_and_hide_the_rest(family, ratio, method):
    model, inputs = batch(family)
    with entering(model, 0) as states:
        generate(model, inputs, 1)
    kept = as_hidden(model, inputs, method, ratio).kept
    for row, vision in enumerate(vision_of(inputs)):
        columns = vision.nonzero()[:, 0]
        embeddings, count = states[0][row], budget(ratio, len(columns))
        if not count:
            continue
        text = embeddings[columns[-1] + 1 :]
        of_row = embeddings[columns]
        chosen = farthest(of_row, count) if method == "divprune" else likeliest(of_row, text, count)
        # Newlines between lines of patches are all the same.
        same = (of_row[:, None] == of_row).all(-1).int().argmax(1)
        ours = [columns.tolist().index(c) for c in kept[0][row] if c < max(LENGTHS) and vision[c]]
        assert sorted(same[ours].tolist()) == sorted(same[chosen].tolist())


def drawn(budgets: list[int], behind: int = 5, size: int = 24) -> Tokens:
    """Rows of text, 20 vision tokens and `behind` more text tokens."""
    vision = torch.zeros(len(budgets), 25 + behind, dtype=torch.bool)
    vision[:, 5:25] = True
    hidden = torch.randn(*vision.shape, size, generator=torch.Generator().manual_seed(0))
    return Tokens(vision, None, budgets, hidden)


@pytest.mark.parametrize("options", [{"relevance": "none"}, {}])
def test_without_text_behind_the_image_or_without_relevance_diversity_alone_counts(options):
    tokens = drawn([7], behind=5 if options else 0)
    method = kvcompress.list_methods()["cdpruner"].cls(**options)
    chosen, _ = method.choose(method.score(tokens), tokens)
    ours, expected = chosen[0].nonzero()[:, 0] - 5, likeliest(tokens.hidden[0, 5:25], tokens.hidden[0, :0], 7)
    if options:
        assert ours.tolist() == sorted(expected)
    else:  # the prompt's last token, a vision token, takes the last place
        assert ours.tolist() == sorted({*expected[:6], 19})


def test_where_the_rank_is_used_up_relevance_decides():
    tokens = drawn([9], size=4)
    method = kvcompress.list_methods()["cdpruner"].cls()
    chosen, _ = method.choose(method.score(tokens), tokens)
    embeddings, text = tokens.hidden[0, 5:25], tokens.hidden[0, 25:]
    first = likeliest(embeddings, text, 4)
    states, asked = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (embeddings, text))
    order = (states @ asked.T).mean(1).argsort(descending=True).tolist()
    then = itertools.islice((i for i in order if i not in first), 5)
    assert (chosen[0].nonzero()[:, 0] - 5).tolist() == sorted([*first, *then])


@pytest.mark.parametrize("count", [0, 1, 20, 61])
def test_duplicates_are_dropped_round_by_round(count):
    features = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    features = torch.nn.functional.normalize(features.double(), dim=-1)
    places = torch.arange(1, 63)
    left = places.tolist()
    while count and len(left) > count:
        some, others = left[::2], left[1::2]
        alike = [max(float(features[a] @ features[b]) for b in others) for a in some]
        worst = sorted(range(len(some)), key=lambda i: -alike[i])[: min(8, len(left) - count)]
        kept = sorted(set(range(len(some))) - set(worst), key=lambda i: -alike[i])
        left = [*(some[i] for i in kept), *others]
    assert distinct(features, places, count).tolist() == (left if count else [])


def test_equal_tokens_are_chosen_once_and_counts_are_exact():
    tokens = drawn([12, 20, 1])
    tokens.hidden[0, 5:15] = tokens.hidden[0, 5]
    for name in ("divprune", "cdpruner"):
        method = kvcompress.list_methods()[name].cls()
        chosen, hidden = method.choose(method.score(tokens), tokens)
        assert chosen.sum(1).tolist() == [12, 20, 1]
        assert hidden is tokens.hidden
        assert chosen[0, 15:25].all()  # all that differ, and two of the ten that do not
    assert len(most_diverse(torch.ones(5, 3), 3)) == 1
    assert sorted(farthest_first(torch.ones(5, 3) / 3**0.5, 5).tolist()) == [0, 1, 2, 3, 4]
