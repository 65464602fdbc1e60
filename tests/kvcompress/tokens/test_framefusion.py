"""FrameFusion: like tokens of successive frames are merged, the others pruned by attention."""

import math
from itertools import pairwise

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.scoring.vision import vision_token_mask
from tests.support.examples import paired
from tests.support.token_methods import (
    NEW,
    VIDEO_FAMILIES,
    as_hidden,
    budget,
    entering,
    full_attention,
    kept_columns,
    video_batch,
)


@pytest.mark.parametrize(("family", "ratio"), paired(list(VIDEO_FAMILIES), [0.4, 0.6, 1.0]))
def test_framefusion_prunes_by_the_attention_of_the_layer_before_where_nothing_is_alike(family, ratio):
    frames = [8, 8] if family == "llava-onevision" else [7, 5]
    model, inputs, _ = video_batch(family, frames)
    plain, full_logits = generate(model, inputs, NEW)
    hidden = as_hidden(model, inputs, "framefusion", ratio, similarity=1.0)
    if ratio == 1:
        assert torch.equal(hidden.tokens, plain)
        assert torch.equal(hidden.logits, full_logits)
        return
    weights = full_attention(model, inputs)[0].double().mean(1)[:, -1]
    for row, vision in enumerate(vision_token_mask(model.config, inputs["input_ids"])):
        columns = vision.nonzero()[:, 0].tolist()
        # The first layer holds all, the three others what makes the mean right.
        left = math.floor((4 * budget(ratio, len(columns)) - len(columns)) / 3 + 0.5)
        best = weights[row].masked_fill(~vision, -1).topk(left).indices.tolist()
        stays = [[c for c in layer[row] if c < len(vision) and vision[c]] for layer in hidden.kept]
        assert stays == [columns, sorted(best), sorted(best), sorted(best)]


@pytest.mark.parametrize(("family", "ratio"), paired(list(VIDEO_FAMILIES), [0.3, 0.8]))
def test_framefusion_merges_runs_of_like_tokens_at_a_place_into_their_mean(family, ratio):
    frames = [8, 8] if family == "llava-onevision" else [7, 5]
    model, inputs, of_frames = video_batch(family, frames)
    with entering(model, 0) as states:
        generate(model, inputs, 1)
        with kvcompress.compress(model, "framefusion", ratio, similarity=0.0) as session:
            generate(model, inputs, 1)
    kept = kept_columns(session.cache)
    vision = vision_token_mask(model.config, inputs["input_ids"])
    for row, columns in enumerate(of_frames):
        embeddings, size = states[0][row].double(), len(columns[0])
        n = int(vision[row].sum())
        alike = {
            now: torch.cosine_similarity(embeddings[now], embeddings[then], dim=0).item()
            for before, frame in pairwise(columns)
            for then, now in zip(before, frame, strict=True)
        }
        goes = sorted((c for c in alike if alike[c] >= 0), key=alike.get, reverse=True)[: n - budget(ratio, n)]
        expected = embeddings.clone()
        for place in range(size):
            run = []
            for column in [frame[place] for frame in columns]:
                run = [*run, column] if column in goes else [column]
                expected[run[0]] = embeddings[run].mean(0)
        stays = [c for c in range(len(embeddings)) if inputs["attention_mask"][row, c] and c not in goes]
        assert kept[0][row] == stays
        torch.testing.assert_close(states[1][row, -len(stays) :].double(), expected[stays], atol=1e-5, rtol=0)
        left = [sum(vision[row, c].item() for c in layer[row] if c < len(embeddings)) for layer in kept]
        assert abs(sum(left) / 4 - budget(ratio, n)) <= 0.5
        assert left == sorted(left, reverse=True)
