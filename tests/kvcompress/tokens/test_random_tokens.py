"""Random vision tokens: every token is as likely to stay, and a row's draw is its own."""

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.tokens import Tokens
from tests.support.families import FAMILIES, VLM_FAMILIES
from tests.support.token_methods import LENGTHS, NEW, TOLERANCE, batch, hidden_from, kept_columns, vision_of


def chosen(seed: int, row_seeds: tuple[int, ...], budget: int = 5) -> torch.Tensor:
    """The places, among 20 vision tokens before a text, of those that stay: bool (rows, 20)."""
    vision = torch.zeros(len(row_seeds), 30, dtype=torch.bool)
    vision[:, 5:25] = True
    tokens = Tokens(vision, None, [budget] * len(row_seeds), vision[..., None].float(), row_seeds=row_seeds)
    method = kvcompress.list_methods()["random-tokens"].cls(seed=seed)
    kept, hidden = method.choose(method.score(tokens), tokens)
    assert hidden is tokens.hidden
    return kept[:, 5:25]


@pytest.mark.parametrize("family", VLM_FAMILIES)
def test_what_it_drops_is_hidden_and_a_row_alone_keeps_the_same(family):
    model, inputs = batch(family)
    with kvcompress.compress(model, "random-tokens", 0.4) as session:
        tokens, logits = generate(model, inputs, NEW)
    together = kept_columns(session.cache)
    with hidden_from(model, together):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    vision, real = vision_of(inputs), inputs["attention_mask"].bool()
    for row, length in enumerate(LENGTHS):
        pads = max(LENGTHS) - length
        with kvcompress.compress(model, "random-tokens", 0.4) as session:
            generate(model, FAMILIES[family].solo(inputs, row), NEW, forced=tokens[row : row + 1])
        assert [[c - pads for c in layer[row]] for layer in together] == [
            layer[0] for layer in kept_columns(session.cache)
        ]
        text = (real[row] & ~vision[row]).nonzero()[:, 0].tolist()
        assert set(text) <= set(together[0][row])


def test_every_token_is_as_likely_to_stay_and_the_budget_is_exact():
    kept = chosen(0, tuple(range(4000)))
    assert kept.sum(1).tolist() == [5] * 4000
    shares = kept.double().mean(0)
    assert (shares - 0.25).abs().max() < 0.03  # four standard deviations
    together = (kept[:, :1] & kept).double().mean(0)[1:]  # with the first token: each of the others equally often
    assert (together - 0.25 * 4 / 19).abs().max() < 0.015


def test_the_draw_depends_on_the_seed_and_on_the_row_s_own_tokens():
    first, second, again = chosen(0, (1, 2, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, chosen(1, (1,))[0])
