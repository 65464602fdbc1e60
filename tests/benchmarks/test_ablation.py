"""The ablation changes one part of SnapKV at a time and tests each value against SnapKV on the same questions."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import ablation
from benchmarks.method_cells import Answers
from kvcompress.policy.make import make_policy
from tests.benchmarks.test_ruler import QUESTIONS, task


@pytest.mark.parametrize("window", [8, 32])
def test_every_value_is_a_policy_that_differs_from_snapkv_in_its_part_alone(window):
    found = {}
    for key, (cell, _) in ablation.cells(window).items():
        options = {**cell.protocol.options, **cell.options}
        found[key] = make_policy(cell.method, cell.column.ratio, **options)
    base = found.pop(("", ""))
    assert base.cluster.window_size == window
    for (part, _), policy in found.items():
        assert (policy.cluster != base.cluster) == (part in ("score", "window", "pooling"))
        assert (policy.engine != base.engine) == (part not in ("window", "pooling"))
    assert len({repr(policy) for policy in found.values()}) == len(found)


def test_values_that_survive_correction_are_bold_and_coloured(tmp_path):
    tasks = [task("a"), task("b")]
    answers, asked, generator = Answers(tmp_path / "answers.json", "same"), ablation.cells(32), np.random.default_rng(0)
    right = {("", ""): 0.5, ("score", "r-kv"): 0.98, ("merging", "cam"): 0.5}
    for key, share in right.items():
        for one in tasks:
            for cell in asked[key]:
                scores = (generator.random(QUESTIONS) < share).astype(float)
                answers.add(ablation.of_task(cell, one), scores.tolist())
    answers.add(ablation.of_task(asked["score", "h2o"][0], tasks[0]), [1] * QUESTIONS)  # unfinished
    base, rows = ablation.rows_of(asked, tasks, answers)
    cut = Answers(tmp_path / "cut.json", "same")
    assert ablation.rows_of(asked, tasks, cut) is None
    assert {(row.part, row.value): row.survives for row in rows} == {("score", "r-kv"): True, ("merging", "cam"): False}
    assert all(row.against.questions == 2 * QUESTIONS for row in rows)
    text = ablation.report({"qwen2": (base, rows)})
    (line,) = [line for line in text.splitlines() if line.startswith("| score | r-kv |")]
    assert line.count("**") == 2
    ablation.draw(
        {"qwen2": (base, rows), "bundled": (base, [replace(row, p_value=1.0) for row in rows])}, tmp_path / "a.png"
    )
    assert (tmp_path / "a.png").stat().st_size > 10_000
