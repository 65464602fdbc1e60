"""VidCom2: more tokens for unusual frames, and the unusual tokens of each."""

import math

import pytest
import torch

from kvcompress.tokens.vidcom2 import kept_of_frames
from tests.support.examples import paired
from tests.support.token_methods import VIDEO_FAMILIES, budget, of_video


def kernels(state: torch.Tensor, mean: torch.Tensor) -> float:
    apart = float((state - mean).square().sum())
    return sum(math.exp(-apart / (2 * width)) for width in (1 / 8, 1 / 4, 1 / 2, 1, 2))


def stays(video: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """The (frame, place) of the tokens of a video (frames, tokens, size) that stay, by the definition."""
    frames, tokens, size = video.shape
    spread = [float((channel - channel.mean()).square().mean()) for channel in video.flatten(0, 1).T]
    steady = sorted(range(size), key=lambda c: spread[c])[: size // 2]
    states = [[video[f, t, steady] / video[f, t, steady].norm() for t in range(tokens)] for f in range(frames)]
    means = [sum(frame) / tokens for frame in states]
    whole = sum(means) / frames
    to_video = [[kernels(state, whole) for state in frame] for frame in states]
    unlike = [-sum(frame) / tokens / 0.01 for frame in to_video]
    weights = [math.exp(u - max(unlike)) for u in unlike]
    share = [1 + w / sum(weights) - 1 / frames for w in weights]
    low, high = 0.0, tokens * frames / min(share)
    for _ in range(200):  # the scale at which all frames' tokens, at most all of a frame, sum to the budget
        scale = (low + high) / 2
        quota = [min(max(scale * s, 1 if count >= frames else 0), tokens) for s in share]
        low, high = (scale, high) if sum(quota) < count else (low, scale)
    counts = [math.floor(q + 1e-9) for q in quota]
    rest = sorted(range(frames), key=lambda f: (counts[f] - quota[f], f))
    for f in rest[: count - sum(counts)]:
        counts[f] += 1
    kept = []
    for f, (frame, mean) in enumerate(zip(states, means, strict=True)):
        order = sorted(range(tokens), key=lambda t: to_video[f][t] + kernels(frame[t], mean))
        kept += [(f, t) for t in order[: counts[f]]]
    return sorted(kept)


@pytest.mark.parametrize(("family", "ratio"), paired(list(VIDEO_FAMILIES), [0.1, 0.4, 0.8, 1.0]))
def test_it_keeps_what_a_plain_reference_chooses_and_hides_the_rest(family, ratio):
    kept, states, of_frames = of_video("vidcom2", family, ratio)
    for row, columns in enumerate(of_frames if ratio < 1 else []):
        newline = int(family == "llava-onevision")
        count = budget(ratio, sum(map(len, columns)) + newline) - newline
        chosen = stays(states[row, torch.tensor(columns)].double(), count)
        shown = {c for frame in columns for c in frame}
        assert [c for c in kept[row] if c in shown] == [columns[frame][place] for frame, place in chosen]


def test_an_unusual_frame_keeps_more_and_every_frame_one_if_there_are_as_many():
    generator = torch.Generator().manual_seed(0)
    video = torch.ones(6, 20, 16) + 0.3 * torch.randn(6, 20, 16, generator=generator)
    video[4] += torch.randn(20, 16, generator=generator)
    for count in (1, 6, 30, 119, 120):
        kept = kept_of_frames(video, count)
        assert int(kept.sum()) == count
        assert kept.any(1).all() or count < 6
    counts = kept_of_frames(video, 30).sum(1).tolist()
    assert counts[4] > 1.5 * max(counts[:4] + counts[5:])
    assert kept_of_frames(video, 110)[4].all()  # and what it cannot take goes to the others
