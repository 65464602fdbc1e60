"""Random vision tokens: every token is as likely to stay, and a row's draw is its own."""

import torch

import kvcompress
from kvcompress.tokens import Tokens


def chosen(seed: int, row_seeds: tuple[int, ...], budget: int = 5) -> torch.Tensor:
    """The places, among 20 vision tokens before a text, of those that stay: bool (rows, 20)."""
    vision = torch.zeros(len(row_seeds), 30, dtype=torch.bool)
    vision[:, 5:25] = True
    tokens = Tokens(vision, None, [budget] * len(row_seeds), vision[..., None].float(), row_seeds=row_seeds)
    method = kvcompress.list_methods()["random-tokens"].cls(seed=seed)
    kept, hidden = method.choose(method.score(tokens), tokens)
    assert hidden is tokens.hidden
    return kept[:, 5:25]


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
