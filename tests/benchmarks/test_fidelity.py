"""The table of how much of the authors' choice ours shares."""

import pytest
import torch

from benchmarks import fidelity
from tests.oracle.authors import ours, recording
from tests.oracle.authors.recording import Recording
from tests.oracle.authors.states import states


def test_a_share_is_rounded_down_so_that_only_equality_is_100():
    assert [fidelity.percent(share) for share in (1.0, 0.99999, 0.5, None)] == ["100", "99.9", "50", ""]


def test_only_whole_prompts_at_the_tables_ratios_count():
    prompt = states("tiny").prompt

    def at(length: int, budget: int) -> Recording:
        return Recording("snapkv", "snapkv", {}, "tiny", length, budget, torch.empty(0))

    assert fidelity.ratio_of(at(prompt, round(0.2 * prompt))) == 0.2
    assert fidelity.ratio_of(at(prompt, round(0.2 * prompt) + 1)) is None
    assert fidelity.ratio_of(at(prompt // 3, round(0.2 * prompt))) is None


def test_a_row_has_the_shares_of_its_recordings_and_the_named_difference(monkeypatch):
    prompt = states("tiny").prompt
    held = ours.ours(states("tiny"), prompt, 0, "streamingllm", round(0.5 * prompt)).kept
    other = held.clone()
    other[:, :, 4] = True  # in place of the oldest recent token, the fifth
    other[:, :, held[0, 0].nonzero().flatten()[4]] = False
    found = [
        Recording(label, "streamingllm", {}, "tiny", prompt, round(0.5 * prompt), kept)
        for label, kept in (("streamingllm", held), ("five sinks", other))
    ]
    source = {"repository": "https://github.com/owner/name", "commit": "0123456789"}
    monkeypatch.setattr(recording, "fixtures", lambda: ["kvcache_factory"])
    monkeypatch.setattr(recording, "about", lambda name: source)
    monkeypatch.setattr(recording, "load", lambda name: found)
    monkeypatch.setattr(
        fidelity.import_module("tests.oracle.authors.kvcache_factory"), "DIFFERENCES", {"five": (0.9, "a sink")}
    )
    same, differs = fidelity.rows()
    assert (same.shares, same.differs) == ({(0, 0.5): 1.0}, ())
    kept = int(held[0, 0].sum())
    assert differs.shares == {(0, 0.5): pytest.approx((kept - 1) / kept)}
    table = fidelity.markdown([same, differs])
    assert "| five sinks <sup>1</sup> | [name] | tiny |" in table
    assert "| streamingllm | [name] | tiny |100|" in table
    assert table.endswith("\n1. a sink\n\n[name]: https://github.com/owner/name/tree/0123456789\n")
