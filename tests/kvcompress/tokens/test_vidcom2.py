"""VidCom2: more tokens for unusual frames, and the unusual tokens of each."""

import torch

from kvcompress.tokens.vidcom2 import kept_of_frames


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
