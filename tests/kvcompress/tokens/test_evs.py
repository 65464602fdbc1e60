"""EVS: the first frame, and what has changed since the frame before."""

from itertools import pairwise

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from tests.support.examples import paired
from tests.support.token_methods import VIDEO_FAMILIES, budget, kept_columns, of_video, video_batch


@pytest.mark.parametrize(("family", "ratio"), paired(list(VIDEO_FAMILIES), [0.3, 0.7, 1.0]))
def test_evs_keeps_the_first_frame_and_what_has_changed_since_the_frame_before(family, ratio):
    kept, states, of_frames = of_video("evs", family, ratio)
    for row, columns in enumerate(of_frames if ratio < 1 else []):
        newline = int(family == "llava-onevision")
        n = budget(ratio, sum(map(len, columns)) + newline) - newline
        likeness = {
            now: torch.cosine_similarity(states[row, now].double(), states[row, then].double(), dim=0).item()
            for before, frame in pairwise(columns)
            for then, now in zip(before, frame, strict=True)
        }
        stays = [*columns[0], *sorted(likeness, key=likeness.get)[: n - len(columns[0])]]
        shown = {c for frame in columns for c in frame}
        assert [c for c in kept[row] if c in shown] == sorted(stays)


def test_evs_may_keep_the_first_frame_alone():
    model, inputs, _ = video_batch("qwen2-vl", [4])
    with kvcompress.compress(model, "evs", 0.25) as session:
        generate(model, inputs, 1)
    vision = inputs["mm_token_type_ids"][0].bool()
    assert [c for c in kept_columns(session.cache)[0][0] if vision[c]] == vision.nonzero()[:12, 0].tolist()
