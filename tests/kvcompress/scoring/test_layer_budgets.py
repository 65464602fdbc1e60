"""Rules that share out a budget over layers, in the cases that a whole model seldom meets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.layer_budgets.base import layer_budget
from kvcompress.layer_budgets.cake import shared_out
from kvcompress.scoring.layer_view import LayerView


@given(
    weights=st.lists(st.integers(0, 64), min_size=1, max_size=9),
    most=st.integers(1, 40),
    part=st.floats(0, 1),
)
def test_cakes_shares_fill_the_budget_and_none_is_longer_than_a_layer(weights, most, part):
    total = int(part * most * len(weights))
    shares = shared_out(weights, total, most)
    assert sum(shares) == total
    assert 0 <= min(shares) <= max(shares) <= most


def test_a_layer_that_is_full_leaves_its_share_to_the_others():
    assert shared_out([17, 9, 1], 27, 10) == [10, 10, 7]


def test_text_that_is_protected_is_not_counted_as_text_to_evict():
    keys, vision = torch.randn(2, 2, 12, 8), torch.zeros(2, 12, dtype=torch.bool)
    vision[:, 4:9] = True
    padding = torch.tensor([[0], [2]])
    protected = torch.zeros(2, 12, dtype=torch.bool)
    protected[:, 2:5] = True  # two of text, one of vision
    rule = layer_budget("strength")

    def text(**more: object) -> list[float]:
        view = LayerView(0, 3, [12, 10], [6, 6], 1.0, padding=padding, vision=vision, **more)
        return rule.measure(torch.randn(2, 4, 12, 8), keys, keys, torch.rand(2, 2, 12), view)[:, 2].tolist()

    assert text() == [7, 5]
    assert text(protected=protected) == [5, 3]
    assert text(protected=~vision) == [0, 0]


def test_a_layer_whose_states_are_not_finite_has_sizes_beside_the_others():
    scores = torch.rand(3, 30)
    scores[:, 4] = torch.nan  # left out of all layers
    scores[1] = torch.nan
    sizes = layer_budget("prefix").weights(scores, 10, 30)
    assert sizes[1] == 6
    assert sum(sizes) == pytest.approx(30, abs=1)
