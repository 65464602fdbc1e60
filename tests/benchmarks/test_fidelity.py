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

    assert fidelity.ratio_in_table(at(prompt, round(0.2 * prompt))) == 0.2
    assert fidelity.ratio_in_table(at(prompt, round(0.2 * prompt) + 1)) is None
    assert fidelity.ratio_in_table(at(prompt // 3, round(0.2 * prompt))) is None


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
    table = fidelity.markdown([same, differs], [])
    assert "| five sinks <sup>1</sup> | [name] | tiny |" in table
    assert "| streamingllm | [name] | tiny |100|" in table
    assert table.endswith("\n1. a sink\n\n[name]: https://github.com/owner/name/tree/0123456789\n")


def of(label: str, repository: str, commit: str, **known: object) -> fidelity.Row:
    return fidelity.Row(label, "tiny", repository, commit, **({"shares": {}, "differs": (), "held": {}} | known))


def test_no_two_commits_are_linked_by_the_same_name():
    home, other = "https://github.com/owner/name", "https://github.com/other/else"
    found = [of("a", home, "0123456789"), of("b", home, "v0.5.5"), of("c", other, "0123456789")]
    dropping = [fidelity.TokenRow("d", home, "0123456789", (64,), 1.0)]
    links = [line for line in fidelity.markdown(found, dropping).splitlines() if line.startswith("[")]
    assert links == [
        f"[name 0123456]: {home}/tree/0123456789",
        f"[name v0.5.5]: {home}/tree/v0.5.5",
        f"[else]: {other}/tree/0123456789",
    ]


def test_a_label_without_a_figure_has_no_row(monkeypatch):
    prompt = states("tiny").prompt
    kept = torch.ones(4, 2, prompt + 16, dtype=torch.bool)
    one = Recording("streamingllm", "streamingllm", {}, "tiny", prompt, round(0.5 * prompt), kept, decoded=16)
    monkeypatch.setattr(recording, "fixtures", lambda: ["kvcache_factory"])
    monkeypatch.setattr(recording, "load", lambda name: [one])
    assert list(fidelity.rows()) == []


def test_the_page_has_no_row_without_a_figure_and_no_link_twice():
    table = fidelity.PAGE.read_text(encoding="utf-8").partition("<!-- fidelity: ")[2].partition("<!-- end of")[0]
    rows = [line for line in table.splitlines() if "| [" in line]
    assert len(rows) > 50
    assert all(any(letter.isdigit() for letter in line.rpartition("] |")[2].partition("|")[2]) for line in rows)
    links = [line.partition("]: ")[0] for line in table.splitlines() if "]: " in line]
    assert len(links) == len(set(links))


def test_what_their_code_holds_in_place_of_the_ratio_stands_beside_the_share():
    prompt = states("tiny").prompt
    one = Recording("snapkv", "snapkv", {}, "tiny", prompt - 1, 100, torch.empty(0), ratio=0.2)
    assert fidelity.ratio_in_table(one) == 0.2
    shares, held = {(0, 0.5): 1.0, (0, 0.2): 0.98}, {0.5: 0.499, 0.2: 0.264}
    row = of("a", "https://github.com/owner/name", "0", shares=shares, held=held)
    assert [fidelity.cell(row, ratio) for ratio in (0.5, 0.2, 0.1)] == ["100", "98 (0.26)", ""]


def test_a_token_methods_row_has_the_least_share_of_its_recordings():
    (row,) = [row for row in fidelity.token_rows() if row.label == "fastv"]
    assert (row.budgets, row.share) == ((48, 24, 10, 95), 1.0)
    assert row.repository.endswith("/FastV")
    assert "| fastv | [FastV] | 48, 24, 10, 95 | 100 |" in fidelity.markdown([], [row])
