"""What the authors' token methods let through, and what ours let through of the same tokens."""

from importlib import import_module

import pytest

from .token_recording import FIXTURES, load, share

CASES = [
    pytest.param(path.stem, recording, id=f"{path.stem} {recording.label} {recording.budget}")
    for path in sorted(FIXTURES.glob("*.npz"))
    for recording in load(path.stem)
]


@pytest.mark.parametrize(("fixture", "recording"), CASES)
def test_ours_lets_through_what_the_authors_code_lets_through(fixture, recording):
    ours = import_module(f"{__package__}.{fixture}").ours(recording)
    for theirs, states in zip(recording.states, ours, strict=True):
        assert len(states) == len(theirs)
        assert share(theirs, states) == 1.0
