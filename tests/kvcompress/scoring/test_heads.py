"""Scores of one token in several KV heads, wherever each head has stored it."""

import pytest
import torch

import kvcompress
from kvcompress.clusters import defensivekv
from kvcompress.scoring.heads import over_heads
from kvcompress.scoring.layer_view import LayerView, Settings, StoredEntries

# Two rows of three KV heads; -1 is a slot that is not in use.
COLUMNS = torch.tensor([[[-1, 0, 3, 7], [0, 3, 5, 7], [-1, -1, 5, 8]], [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]])


def stored_view(**further: object) -> LayerView:
    stored = StoredEntries(COLUMNS, 9, (9, 9))
    return LayerView(0, 3, [4, 4], [2, 2], 1.0, padding=(COLUMNS < 0).sum(2), stored=stored, **further)


def numbers(seed: int = 0) -> torch.Tensor:
    found = torch.rand(COLUMNS.shape, generator=torch.Generator().manual_seed(seed)) + 0.1
    return found.masked_fill(COLUMNS < 0, torch.nan)  # what lies there must not matter


def mean_of_holders(found: torch.Tensor) -> torch.Tensor:
    """The mean of each entry's number over the heads that hold its token, one by one."""
    means = torch.zeros_like(found)
    for row, head, slot in (COLUMNS >= 0).nonzero().tolist():
        is_same = COLUMNS[row] == COLUMNS[row, head, slot]
        means[row, head, slot] = found[row][is_same].mean()
    return means


def real(found: torch.Tensor) -> torch.Tensor:
    return found[COLUMNS >= 0]


def test_stored_entries_count_with_the_same_token_of_other_heads():
    found = numbers()
    torch.testing.assert_close(real(over_heads(found, stored_view())), real(3 * mean_of_holders(found)))


def test_in_a_prompt_all_heads_hold_all_tokens():
    found = torch.rand(2, 3, 5)
    assert torch.equal(over_heads(found, LayerView(0, 3, [5, 5], [2, 2], 1.0)), found.sum(1, keepdim=True))


def test_kvcompose_averages_a_token_s_own_scores():
    found = numbers()
    score = kvcompress.make_cluster("kvcompose").score(None, None, None, stored_view(received=found))
    torch.testing.assert_close(real(score), real(found + mean_of_holders(found)))


def test_defensivekv_shares_a_token_s_norm_among_its_heads(monkeypatch):
    """All keys are zero, so that each head's attention, and thus the risk, is even."""
    norms = numbers()
    monkeypatch.setattr(defensivekv, "projected_norm", lambda values, view, name: norms.clone())
    cluster = kvcompress.make_cluster("defensivekv", window_size=1, kernel_size=1, mass=0.0)
    zeros = torch.zeros(2, 3, 4, 8)
    score = cluster.score(zeros[:, :, :1], zeros, zeros, stored_view(settings=Settings(cluster)))
    shares = norms / (3 * mean_of_holders(norms))
    older = (COLUMNS >= 0)[..., :-1]
    risk = 1 / (COLUMNS >= 0).sum(2, keepdim=True)
    torch.testing.assert_close(score[..., :-1][older], (risk * shares)[..., :-1][older])


@pytest.mark.parametrize("shared", [False, True])
def test_csp_chooses_no_more_by_the_first_ranking_than_its_share(shared):
    """Also where all heads keep the same tokens."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(1, 8, 40, 16, generator=generator) for _ in range(2))
    cluster = kvcompress.make_cluster("csp")
    settings = Settings(cluster, head_budget="shared" if shared else "uniform")
    view = LayerView(0, 1, [40], [20], 0.25, settings=settings)
    score = cluster.score(queries, keys, keys, view)
    if shared:
        score = score.mean(1, keepdim=True)
    assert ((score == torch.inf).sum(-1) <= 20 - 5).all()  # 10 recent ones, and half of the rest
