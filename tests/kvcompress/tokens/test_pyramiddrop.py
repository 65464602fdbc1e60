"""PyramidDrop: three steps, at each of which the same share of the vision tokens stays."""

import pytest

import kvcompress
from kvcompress.policy.make import make_policy

METHOD = kvcompress.list_methods()["pyramiddrop"].cls


def test_the_preset_halves_the_tokens_at_layers_8_16_and_24():
    assert METHOD().layers(12) == [3, 6, 9]
    kept = make_policy("pyramiddrop", preset="half").budget(576)
    assert METHOD().layers(32) == [8, 16, 24]
    assert METHOD().budgets(kept, 576, 32) == [288, 144, 72]


@pytest.mark.parametrize("steps", [(8, 16, 24), (4, 12, 20), (2, 10, 30)])
def test_layers_hold_in_the_mean_what_was_asked_for_and_steps_keep_one_share(steps):
    method, tokens = METHOD(steps=steps), 5760
    spans = [after - before for before, after in zip(steps, [*steps[1:], 32], strict=True)]
    for kept in (1441, 2000, 2700, 5000, 5759):
        counts = method.budgets(kept, tokens, 32)
        mean = (steps[0] * tokens + sum(span * count for span, count in zip(spans, counts, strict=True))) / 32
        assert kept - 1 <= mean <= kept + 0.001
        share = counts[0] / tokens
        assert counts == pytest.approx([tokens * share, tokens * share**2, tokens * share**3], abs=3)
    assert method.budgets(tokens, tokens, 32) == [tokens] * 3
    assert method.budgets(0, 0, 32) == [0, 0, 0]


def test_in_a_short_model_steps_coincide_and_count_as_so_many():
    assert METHOD().layers(2) == [1]
    assert METHOD().budgets(50 + 4, 100, 2) == [8]  # one layer of 100 and one of 8
    assert METHOD().layers(5) == [1, 3, 4]
