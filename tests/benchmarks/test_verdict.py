"""The verdict compares every method with draws of chance, by rules that cannot see the answers."""

from dataclasses import replace

import numpy as np
import pytest

import kvcompress
from benchmarks import verdict
from benchmarks.method_cells import Answers, Cell
from lmms_eval_plugins.report.significance import paired_test

QUESTIONS = 200


@pytest.fixture(scope="module")
def task():
    return verdict.task_of("tiny")


def answered(tmp_path, task, monkeypatch, right: dict[str, float], refused: str | None = None) -> Answers:
    """Answers that are right as often as asked, at random; each cell by its own draw."""
    answers, generator = Answers(tmp_path / "answers.json", task.identity), np.random.default_rng(1)
    monkeypatch.setattr(answers, "_write", lambda: None)
    asked: list[Cell] = []
    for cell in verdict.cells(task):
        if cell.method in right:
            asked.append(cell)
            if cell.method == refused and cell.column.ratio == 0.1:
                answers.refuse(cell, kvcompress.KVCompressError("no room"))
            else:
                answers.add(cell, (generator.random(QUESTIONS) < right[cell.method]).astype(float).tolist())
    monkeypatch.setattr(verdict, "cells", lambda task: asked)
    return answers


def test_every_kv_method_and_chance_protect_the_same_tokens(task):
    (protocol,) = task.protocols
    assert protocol.options["protect"] == "system+question"
    asked = verdict.cells(task)
    for baseline in verdict.CHANCE.values():
        draws = [cell for cell in asked if cell.method == baseline]
        assert len({cell.key for cell in draws}) == verdict.DRAWS * len(verdict.RATIOS)
    assert all(cell.protocol == protocol for cell in asked)
    assert len({cell.method for cell in asked}) > 48


def test_what_is_better_than_chance_is_told_from_what_is_not(tmp_path, task, monkeypatch):
    truth = {"full": 0.95, "hindsight": 0.9, "random": 0.3, "snapkv": 0.6, "knorm": 0.3, "keydiff": 0.1}
    answers = answered(tmp_path, task, monkeypatch, truth | {"tova": 0.9}, refused="tova")
    found = verdict.judged(task, answers)
    assert (found.refusing, found.unasked) == (["tova"], [])
    assert not found.shows_nothing
    assert {row.method: row.verdict for row in found.rows[0]} == {
        "snapkv": "better",
        "knorm": "open",
        "keydiff": "worse",
    }
    text = verdict.report({"tiny": found})
    assert "Left out, since they refuse a ratio: tova." in text
    verdict.draw({"tiny": found}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_equal_means_that_the_whole_interval_is_within_the_margin():
    same = np.tile([0.0, 1.0], 5000)
    other = same.copy()
    other[:40] = 1 - other[:40]
    row = verdict.Row("mine", 50.0, paired_test(other, same), 0.7)
    assert row.verdict == "equal"
    assert replace(row, against=paired_test(other[:100], same[:100])).verdict == "open"


def test_a_regime_with_a_weak_model_shows_nothing(tmp_path, task, monkeypatch):
    answers = answered(tmp_path, task, monkeypatch, {"full": 0.4, "hindsight": 0.4, "random": 0.3})
    assert verdict.judged(task, answers).shows_nothing
