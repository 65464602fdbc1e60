"""Which part of a prompt is compressed."""

import torch

from kvcompress.cache.scope import States, context_of
from kvcompress.scoring.layer_view import LayerView


def test_pads_in_front_of_a_shorter_context_are_neither_vision_nor_protected():
    """Although its first token, which is shifted to the right, is both."""
    queries, keys, values = torch.randn(3, 2, 2, 12, 4)
    states = States(queries, 1.0, torch.nn.Identity(), keys=keys, values=values)
    first = torch.arange(12) < torch.tensor([[1], [3]])
    view = LayerView(0, 1, [12, 12], [5, 5], 1.0, vision=first, protected=first)
    part = context_of(states, view, [6, 10])
    columns = torch.arange(10)
    expected = torch.stack([columns == 4, columns < 3])
    assert torch.equal(part.view.vision, expected)
    assert torch.equal(part.view.protected, expected)
