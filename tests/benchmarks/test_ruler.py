"""RULER beside kvpress: the same entries and answers are counted as the same, and others as others."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import ruler
from benchmarks.ruler import beside_kvpress, places, prompts_of
from tests.support.checkpoints import save_checkpoint

PROMPTS = ["hello, what is the number of the day", "one, two, three, four, five, six"]
PRESS = """
from contextlib import nullcontext


class Press:
    def __init__(self, *_): ...
    def __call__(self, model): return nullcontext()


class ObservedAttentionPress(Press): ...


def __getattr__(name):
    return Press
"""


@pytest.fixture
def kvpress(tmp_path, monkeypatch):
    """One whose presses keep everything."""
    (tmp_path / "kvpress.py").write_text(PRESS)
    (tmp_path / "kvpress-0.5.5.dist-info").mkdir()
    (tmp_path / "kvpress-0.5.5.dist-info" / "METADATA").write_text("Name: kvpress\nVersion: 0.5.5\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return sys.executable


@pytest.mark.slow
def test_what_keeps_everything_is_the_same_as_ours_at_its_budget(kvpress, tmp_path):
    folder = tmp_path / "llama"
    save_checkpoint("llama", folder)
    table = beside_kvpress(kvpress, folder, PROMPTS, 0.5)
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip("| ").split()[0] for row in rows] == list(ruler.COMPARED)
    for _, entries, answers in rows:
        same, every = entries.split(" of ")
        assert same == every != "0"
        assert answers.strip(" |") == str(len(PROMPTS))
    assert "kvpress 0.5.5" in table


def test_other_entries_and_answers_are_counted_as_others(tmp_path, monkeypatch):
    folder = tmp_path / "llama"
    save_checkpoint("llama", folder)

    def theirs(command, check):
        asked = json.loads(Path(command[2]).read_text())
        kept = [[[0, 1, 2, 3]] * 2] * 2
        reply = {name: [{"new": [-1], "kept": kept}] * len(asked["prompts"]) for name in asked["methods"]}
        forms = {name: {} for name in asked["methods"]}
        Path(command[3]).write_text(json.dumps({**reply, "forms": forms, "versions": {}}))

    monkeypatch.setattr(ruler.subprocess, "run", theirs)
    monkeypatch.setattr(ruler, "COMPARED", ("streamingllm",))
    monkeypatch.setattr(ruler, "ours", lambda *_: ([-2], places([[[0, 1, 9]] * 2] * 2)))
    assert "| streamingllm | 16 of 24 | 0 |" in beside_kvpress("python", folder, PROMPTS, 0.5)


def test_prompts_are_those_that_a_cell_answered(tmp_path):
    cell = tmp_path / "niah" / "model" / "full-1"
    cell.mkdir(parents=True)
    (cell / "samples.jsonl").write_text("".join(json.dumps({"input": text}) + "\n" for text in PROMPTS))
    assert prompts_of(tmp_path) == PROMPTS
