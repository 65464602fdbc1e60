"""With KV heads in their order, the code in vLLM leaves out of the representatives what the first head keeps."""

import pytest

from .ours import of
from .recording import load


@pytest.mark.parametrize("states", ["random_gqa", "smollm2"])
def test_the_first_kv_head_keeps_what_it_keeps_in_vllm(states):
    found = [r for r in load("kvcrush") if r.label == "kvcrush, anchor=alternating" and r.states == states]
    assert found
    for recording in found:
        assert recording.kept[:, 0].equal(of(recording).kept[:, 0]), recording.name
