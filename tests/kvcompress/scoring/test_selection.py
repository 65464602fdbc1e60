"""Selecting columns: the ways for many entries give what those for few give."""

import pytest
import torch

from kvcompress.scoring import selection


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_does_not_depend_on_the_way_of_sorting_and_counting(monkeypatch, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, 3, 70, generator=generator).mul_(8).round_()  # many are equal
    padding = torch.tensor([[0], [11]])

    def chosen() -> list[torch.Tensor]:
        flags = scores > 4
        return [
            selection.top_indices(scores, [20, 30], padding),
            selection.adaptive_indices(scores, [20, 30], 0.2, padding),
            selection.counted(flags),
        ]

    few = chosen()
    monkeypatch.setattr(selection, "MANY", 0)
    assert all(torch.equal(one, other) for one, other in zip(few, chosen(), strict=True))
    assert torch.equal(few[2], (scores > 4).cumsum(-1, dtype=torch.int32))
