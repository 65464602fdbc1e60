"""Every recording of the authors' code against what ours keeps of the same states.

A script's `DIFFERENCES` names the only cases in which they may differ: beginning of the recording's name -> the least
share of common entries, and what differs. The longest beginning that fits counts.
"""

from collections import defaultdict
from importlib import import_module

import pytest
import torch

from .ours import of, share
from .recording import Recording, fixtures, load

QUICK = 3  # prompts of each label that an ordinary run compares, at most, and one with decode steps; all are slow


def quick(recordings: list[Recording]) -> list[Recording]:
    decoded = [recording for recording in recordings if recording.decoded]
    prompts = [recording for recording in recordings if not recording.decoded]
    return [*prompts[:: max(1, -(-len(prompts) // QUICK))], *decoded[len(decoded) // 2 :][:1]]


def differences(fixture: str) -> dict[str, tuple[float, str]]:
    return import_module(f"{__package__}.{fixture}").DIFFERENCES


def cases() -> list:
    found = []
    for fixture in fixtures():
        recordings = load(fixture)
        for label in dict.fromkeys(recording.label for recording in recordings):
            here = sorted((r for r in recordings if r.label == label), key=lambda r: (r.decoded, r.prompt))
            found.append(pytest.param(fixture, quick(here), id=f"{fixture} {label}"))
            found.append(pytest.param(fixture, here, id=f"{fixture} {label} all", marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize(("fixture", "recordings"), cases())
def test_ours_keeps_what_the_authors_code_keeps_but_for_named_differences(fixture, recordings, request):
    named, shares = differences(fixture), defaultdict(list)
    for recording in recordings:
        held = of(recording)
        fitting = [start for start in named if recording.name.startswith(start)]
        least, why = named[max(fitting, key=len)] if fitting else (1.0, "")
        found = share(recording, held)
        assert found >= least, f"{recording.name}: {found:.3f} of the kept entries are the same"
        shares[why].append(found)
        for theirs, our in ((recording.keys, held.keys), (recording.values, held.values)):
            if theirs is not None and not why:
                stored = torch.stack([torch.stack(layer) for layer in our])
                torch.testing.assert_close(stored, theirs, rtol=1e-4, atol=1e-5, msg=recording.name)
    if request.node.get_closest_marker("slow"):
        for why, found in shares.items():
            assert not why or min(found) < 1, f"all are equal, so this is no difference: {why}"


def test_merged_states_are_given_by_name_so_that_no_other_field_takes_them():
    kept = torch.ones(1, 1, 2, dtype=torch.bool)
    with pytest.raises(TypeError):
        Recording("knorm", "knorm", {}, "tiny", 2, 2, kept, 0, torch.ones(1, 1, 2, 4))


@pytest.mark.parametrize("fixture", fixtures())
def test_every_named_difference_belongs_to_a_recording(fixture):
    names = [recording.name for recording in load(fixture)]
    for start in differences(fixture):
        assert any(name.startswith(start) for name in names), start
