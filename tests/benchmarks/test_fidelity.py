"""The table of how much of the authors' choice ours shares."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from benchmarks import fidelity
from kvcompress import KVCompressError
from tests.oracle.authors import ours, recording
from tests.oracle.authors.recording import Recording
from tests.oracle.authors.states import states
from tests.support.checkpoints import save_checkpoint


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


# -- beside kvpress


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """The table for a kvpress that keeps given columns in every head, of a tiny model's two prompts at half."""
    folder = tmp_path / "llama"
    save_checkpoint("llama", folder)

    def table(*columns: list[int]) -> list[str]:
        def theirs(command, check):
            order = json.loads(Path(command[2]).read_text())
            assert [prompt["budgets"] for prompt in order["prompts"]] == [[6], [5]]
            config = AutoConfig.from_pretrained(order["model"])
            arrays = {}
            for place, prompt in enumerate(order["prompts"]):
                kept = np.zeros((config.num_hidden_layers, config.num_key_value_heads, len(prompt["ids"])), dtype=bool)
                kept[..., columns[place]] = True
                arrays[f"0/{place}/{prompt['budgets'][0]}"] = np.packbits(kept, axis=-1)
            run = {"method": "streamingllm", "options": {"sinks": 2}, "asked": [[6], [5]]}
            about = {"runs": [run], "versions": {"kvpress": "9", "torch": "7"}}
            np.savez(command[3], **arrays, about=json.dumps(about))

        monkeypatch.setattr(fidelity.subprocess, "run", theirs)
        prompts = [list(range(3, 15)), list(range(20, 30))]
        return fidelity.beside_kvpress("python", folder, prompts, [0.5]).splitlines()

    return table


def test_the_table_beside_kvpress_has_the_least_share_of_the_prompts_and_why_it_is_not_all(beside, monkeypatch):
    ours = [[0, 1, 8, 9, 10, 11], [0, 1, 7, 8, 9]]
    head, *_, row = beside(*ours)
    assert head == "2 prompts of 10 to 12 tokens, float32; kvpress's side: kvpress 9, torch 7."
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["streamingllm sinks=2", "", "100"]
    others = [ours[0], [0, 1, 2, 8, 9]]
    assert [cell.strip() for cell in beside(*others)[-1].strip("|").split("|")][1:] == ["not explained", "80"]
    monkeypatch.setattr(fidelity, "KVPRESS_DIFFERS", {"streamingllm": "a third sink"})
    assert [cell.strip() for cell in beside(*others)[-1].strip("|").split("|")][1:] == ["a third sink", "80"]


def test_the_page_beside_kvpress_says_why_where_not_all_is_the_same():
    rows = [line.strip("| ").split(" | ") for line in fidelity.KVPRESS_PAGE.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row) == 2 + len(fidelity.KVPRESS_RATIOS) and row[0] != "method"][1:]
    assert len(rows) > 20
    for name, why, *shares in rows:
        expected = "" if set(shares) == {"100"} else fidelity.KVPRESS_DIFFERS[name.split()[0]]
        assert why.strip() == expected, name


def test_the_table_beside_kvpress_needs_its_python():
    with pytest.raises(KVCompressError, match="needs --kvpress-python"):
        fidelity.main(["kvpress"])
