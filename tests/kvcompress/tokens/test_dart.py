"""DART: pivots, and vision tokens that are unlike them."""

import pytest
import torch

import kvcompress
from kvcompress.tokens import Tokens


@pytest.mark.parametrize("behind", [0, 2, 9])
@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_counts_are_exact_with_few_tokens_and_with_little_text_behind_the_image(behind, count):
    vision = torch.zeros(1, 25 + behind, dtype=torch.bool)
    vision[:, 5:25] = True
    generator = torch.Generator().manual_seed(0)
    scores, hidden = torch.rand(vision.shape, generator=generator), torch.randn(*vision.shape, 8, generator=generator)
    method = kvcompress.list_methods()["dart"].cls()
    chosen, merged = method.choose(scores, Tokens(vision, None, [count], hidden))
    assert int(chosen.sum()) == count
    assert merged is hidden
    best = scores[0, 5:25].topk(min(4, count - (behind == 0))).indices + 5
    assert chosen[0, best].all()
    assert behind or chosen[0, -1]  # the prompt's last token, a vision token, stays
