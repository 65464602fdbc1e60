"""Where the recordings of entropy-gated ChunkKV and ours differ: within the window alone, whose tokens score alike."""

import pytest

from .ours import of
from .recording import Recording, load


@pytest.mark.parametrize("recording", load("entropy_gated_chunkkv")[::4], ids=lambda recording: recording.name)
def test_outside_the_window_every_token_is_kept_or_not_as_recorded(recording: Recording):
    older = slice(0, recording.prompt - recording.options.get("window_size", 32))
    held = of(recording)
    assert (held.kept[..., older] == recording.kept[..., older]).all()
    assert (held.kept.sum(-1) == recording.budget).all()
