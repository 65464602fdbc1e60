"""Where recordings and ours differ by a named difference: nothing else is another."""

import pytest
import torch

from .ours import of
from .recording import Recording, load


def recordings(fixture: str, label: str, states: str) -> list[Recording]:
    found = [r for r in load(fixture) if r.label == label and r.states == states and r.budget < r.prompt]
    assert found
    return found


@pytest.mark.parametrize("label", ["csp", "csp, presets"])
def test_nothing_that_csps_code_keeps_twice_is_missing_in_ours_which_has_room_for_more(label):
    for recording in load("csp"):
        if recording.label != label or recording.prompt != 300:  # in shorter ones many keys tie: nobody attends across
            continue
        assert not (recording.kept & ~of(recording).kept).any(), recording.name


@pytest.mark.parametrize("recording", load("entropy_gated_chunkkv")[::4], ids=lambda recording: recording.name)
def test_only_within_the_window_whose_tokens_score_alike_does_entropy_gated_chunkkv_differ(recording: Recording):
    older = slice(0, recording.prompt - recording.options.get("window_size", 32))
    held = of(recording)
    assert (held.kept[..., older] == recording.kept[..., older]).all()
    assert (held.kept.sum(-1) == recording.budget).all()


@pytest.mark.parametrize("states", ["random_gqa", "smollm2"])
def test_the_first_kv_head_keeps_what_it_keeps_in_vllms_kvcrush_whose_other_heads_follow_it(states):
    for recording in recordings("kvcrush", "kvcrush, anchor=alternating", states):
        assert recording.kept[:, 0].equal(of(recording).kept[:, 0]), recording.name


# -- layers and heads where the authors' code rounds: no more than the rounding apart


def held_and_recorded(fixture: str, label: str, states: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Entries of each layer and head."""
    return [(of(r).kept.sum(-1), r.kept.sum(-1)) for r in recordings(fixture, label, states)]


@pytest.mark.parametrize("label", ["pyramidkv", "pyramidkv, preset=longbench"])
def test_pyramid_layers_are_theirs_but_for_steps_that_are_rounded_down(label):
    for ours, theirs in held_and_recorded("kvcache_factory", label, "random_gqa"):
        beyond = (theirs - ours)[:, 0]
        assert abs(beyond[0]) <= 1
        assert all(-1 <= more <= layer + 1 for layer, more in enumerate(beyond.tolist()))


@pytest.mark.parametrize("states", ["random_gqa", "random_mha"])
def test_lava_heads_are_theirs_but_for_what_is_rounded_down(states):
    """A layer's size, the heads' floor and each head's rest, of four heads at most."""
    for ours, theirs in held_and_recorded("lava", "lava, each layer's floor", states):
        assert (ours - theirs).min() >= -1
        assert (ours - theirs).max() <= 4


@pytest.mark.parametrize("states", ["random_gqa", "random_mha"])
@pytest.mark.parametrize("label", ["adakv", "adakv, safeguard=0.5"])
def test_adaptive_heads_are_theirs_to_the_entry(label, states):
    for ours, theirs in held_and_recorded("adakv", label, states):
        assert (ours - theirs).abs().max() <= 1
