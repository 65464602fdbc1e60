"""How many entries each layer and head gets where the authors' code rounds: no more than the rounding apart."""

import pytest
import torch

from .ours import of
from .recording import load


def held_and_recorded(fixture: str, label: str, states: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = [r for r in load(fixture) if r.label == label and r.states == states and r.budget < r.prompt]
    assert found
    return [(of(r).kept.sum(-1), r.kept.sum(-1)) for r in found]


@pytest.mark.parametrize("label", ["pyramidkv", "pyramidkv, preset=longbench"])
def test_pyramid_layers_are_theirs_but_for_steps_that_are_rounded_down(label):
    for ours, theirs in held_and_recorded("kvcache_factory", label, "random_gqa"):
        beyond = (theirs - ours)[:, 0]
        assert abs(beyond[0]) <= 1
        assert all(-1 <= more <= layer + 1 for layer, more in enumerate(beyond.tolist()))


def test_lava_heads_are_theirs_but_for_what_is_rounded_down():
    """A layer's size, the heads' floor and each head's rest, of four heads at most."""
    for states in ("random_gqa", "random_mha"):
        for ours, theirs in held_and_recorded("lava", "lava, each layer's floor", states):
            assert (ours - theirs).min() >= -1
            assert (ours - theirs).max() <= 4


@pytest.mark.parametrize("label", ["adakv", "adakv, safeguard=0.5"])
def test_adaptive_heads_are_theirs_to_the_entry(label):
    for states in ("random_gqa", "random_mha"):
        for ours, theirs in held_and_recorded("adakv", label, states):
            assert (ours - theirs).abs().max() <= 1
