"""DART: pivots, and vision tokens that are unlike them."""

import pytest
import torch
from transformers import DynamicCache

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.tokens import Tokens
from tests.support.examples import paired
from tests.support.families import VLM_FAMILIES
from tests.support.token_methods import LENGTHS, as_hidden, assert_rows_as_alone, batch, budget, entering, vision_of


def stays(norms: torch.Tensor, states: torch.Tensor, images: list[int], text: list[int], count: int) -> list[int]:
    """The columns that two vision and three text pivots keep in turn, by the definition, in float64."""
    largest = sorted(images, key=lambda c: -norms[c])[:2]
    kept = largest[:count]
    pivots = sorted(kept) + sorted(sorted(text, key=lambda c: -norms[c])[:3])
    wanted = count - len(kept)
    for turn, pivot in enumerate(pivots):
        share = wanted // len(pivots) + (turn < wanted % len(pivots))
        left = [c for c in images if c not in kept]
        kept += sorted(left, key=lambda c: torch.cosine_similarity(states[c], states[pivot], dim=0).item())[:share]
    return sorted(kept)


@pytest.mark.parametrize(("family", "asked"), paired(list(VLM_FAMILIES), [(1, 0.1), (2, 0.6), (1, 0.6), (2, 0.1)]))
def test_it_keeps_what_a_plain_reference_chooses_and_hides_the_rest(family, asked):
    layer, ratio = asked
    model, inputs = batch(family)
    plain = DynamicCache(config=model.config)
    with entering(model, layer) as states:
        generate(model, inputs, 1, past_key_values=plain)
    norms = plain.layers[layer - 1].keys[:, :, : max(LENGTHS)].double().abs().sum((1, 3))
    options = {"layer": layer, "image_pivots": 2, "text_pivots": 3}
    kept = as_hidden(model, inputs, "dart", ratio, **options).kept
    for row, vision in enumerate(vision_of(inputs)):
        images = vision.nonzero()[:, 0].tolist()
        behind = range(max(images, default=len(vision)) + 1, len(vision))
        count = budget(ratio, len(images))
        ours = [c for c in kept[layer][row] if c < len(vision) and vision[c]]
        assert ours == stays(norms[row], states[0][row].double(), images, list(behind), count)
    assert_rows_as_alone(model, family, inputs, "dart", ratio, **options)


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
