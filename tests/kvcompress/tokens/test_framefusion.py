"""FrameFusion: like tokens of successive frames are merged, the others pruned by attention."""

import pytest
import torch

from kvcompress.check.reference import generate
from kvcompress.scoring.vision import vision_token_mask
from tests.support.examples import paired
from tests.support.token_methods import NEW, VIDEO_FAMILIES, as_hidden, budget, video_batch


@pytest.mark.parametrize(("family", "ratio"), paired(list(VIDEO_FAMILIES), [0.4, 0.6, 1.0]))
def test_where_nothing_is_alike_the_rest_is_hidden_and_layers_hold_in_the_mean_what_was_asked_for(family, ratio):
    model, inputs, _ = video_batch(family, [8, 8] if family == "llava-onevision" else [7, 5])
    hidden = as_hidden(model, inputs, "framefusion", ratio, similarity=1.0)
    if ratio == 1:
        assert torch.equal(hidden.logits, generate(model, inputs, NEW)[1])
    for row, vision in enumerate(vision_token_mask(model.config, inputs["input_ids"])):
        held = [sum(vision[c].item() for c in layer[row] if c < len(vision)) for layer in hidden.kept]
        assert held[0] == int(vision.sum())
        assert abs(sum(held) / 4 - budget(ratio, held[0])) <= 0.5
