"""The table of all methods: only what is missing is computed, and what is worse than random is marked."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvcompress
from benchmarks import method_cells, method_table
from benchmarks.learned import digest
from benchmarks.method_cells import BY_RATIO, FULL, RATIOS, Answers, Cell, Column, Protocol, cells_of, compute, learned
from benchmarks.method_table import Estimate, markdown, rows_of, sign_test
from benchmarks.method_tasks import QUERY_AWARE
from benchmarks.retrieval import OPENING, draw_examples, draw_names, numbered, share_repeated
from tests.support.calibrations import calibration_file
from tests.support.learned_checkpoints import checkpoint_for


@pytest.fixture
def answers(tmp_path):
    return Answers(tmp_path / "answers.json", "even")


def again(answers):
    """What a later run reads."""
    return Answers(answers.path, "even")


def lines_of(cells, answers, questions):
    """The table's lines below its head."""
    return markdown(rows_of(QUERY_AWARE, cells, answers, questions), BY_RATIO, questions).splitlines()[2:]


def test_a_cell_that_is_named_twice_is_answered_once(task, answers):
    one_batch = replace(task, questions=task.batch_size)
    compute(one_batch, 2 * cells_of(one_batch, ["knorm"]), answers)
    assert {len(right) for right in answers.right.values()} == {task.batch_size}


def test_answers_of_a_call_with_fewer_questions_that_end_within_a_batch_are_asked_again(task, answers):
    cells = cells_of(task, ["knorm"])
    compute(replace(task, questions=task.batch_size + 1), cells, answers)
    compute(task, cells, answers)
    assert all(len(answers.of(cell, 10**6)) == task.questions for cell in cells)
    whole = Answers(answers.path.with_name("whole.json"), answers.identity)
    compute(task, cells, whole)
    assert (answers.right, answers.kept) == (whole.right, whole.kept)


def test_a_second_run_computes_only_what_is_missing(task, tmp_path, monkeypatch):
    file = tmp_path / "answers.json"
    compute(task, cells_of(task, ["full", "knorm"]), Answers(file, "even"))
    before = Answers(file, "even").right
    asked = []
    answer = method_cells.answer
    monkeypatch.setattr(method_cells, "answer", lambda *given: asked.append(given[1]) or answer(*given))
    cells = cells_of(task, ["full", "knorm", "random"])
    compute(task, cells, Answers(file, "even"))
    assert {cell.method for cell in asked} == {"random"}
    assert len(asked) == 2 * len(RATIOS)
    after = Answers(file, "even")
    assert before.items() <= after.right.items()
    assert all(len(after.of(cell, task.questions)) == task.questions for cell in cells)


def test_answers_to_other_questions_are_forgotten(tmp_path):
    file, cell = tmp_path / "answers.json", Cell(QUERY_AWARE, "knorm", Column.of(0.5))
    Answers(file, "even").add(cell, [True, False])
    assert Answers(file, "even").of(cell, 2).tolist() == [1, 0]
    assert Answers(file, "odd").of(cell, 2).tolist() == []


def test_answers_may_be_partly_right(tmp_path):
    file, cell = tmp_path / "answers.json", Cell(QUERY_AWARE, "knorm", Column.of(0.5))
    Answers(file, "even").add(cell, [1, 0])
    Answers(file, "even").add(cell, [0.25, 1])
    Answers(file, "even").add(cell, [0, 0])
    assert Answers(file, "even").of(cell, 6).tolist() == [1, 0, 0.25, 1, 0, 0]
    better, worse = np.array([0.5, 0.75, 1, 0.2]), np.array([0.25, 0.5, 1, 0.5])
    assert sign_test(better, worse) == 4 / 8  # two or three of three tosses


def test_an_interrupted_run_goes_on_where_it_was(task, tmp_path, monkeypatch):
    cells = cells_of(task, ["full", "knorm", "random"])
    whole, cut = Answers(tmp_path / "whole.json", "even"), Answers(tmp_path / "cut.json", "even")
    compute(task, cells, whole)
    answer, left = method_cells.answer, iter(range(5))

    def interrupted(*given):
        next(left)  # StopIteration simulates the interruption
        return answer(*given)

    with monkeypatch.context() as patch:
        patch.setattr(method_cells, "answer", interrupted)
        with pytest.raises(StopIteration):
            compute(task, cells, cut)
    compute(task, cells, Answers(tmp_path / "cut.json", "even"))
    assert Answers(tmp_path / "cut.json", "even").right == whole.right


def test_a_cell_is_another_when_its_options_its_protocol_or_its_methods_code_change(monkeypatch):
    cell = Cell(QUERY_AWARE, "snapkv", Column.of(0.5))
    assert cell.key == Cell(QUERY_AWARE, "snapkv", Column.of(0.5)).key
    others = [
        Cell(QUERY_AWARE, "snapkv", Column.of(0.2)),
        Cell(QUERY_AWARE, "snapkv", Column.of(0.5), {"window_size": 8}),
        Cell(Protocol("query-aware", {"scope": "context"}), "snapkv", Column.of(0.5)),
    ]
    assert cell.key not in [other.key for other in others]
    key = cell.key
    with monkeypatch.context() as patch:
        patch.setattr(method_cells, "code_identity", lambda *files: "another")
        assert cell.key == key  # what this process runs is what it imported
        method_cells.method_code.cache_clear()
        assert cell.key != key
    method_cells.method_code.cache_clear()


def test_methods_that_share_no_prompt_pass_run_their_own(task, answers):
    cells = cells_of(task, ["full", "random", "kvzip"])
    compute(task, cells, answers)
    table = markdown(rows_of(QUERY_AWARE, cells, answers, task.questions), BY_RATIO, task.questions)
    assert "| kvzip |" in table
    assert "| **random** |" in table


def test_fewer_questions_of_a_method_are_named_in_its_row(task, answers):
    cells = cells_of(task, ["knorm"])
    for cell in cells:
        answers.add(cell, [True, False])
    assert "| knorm (2 questions) |" in markdown(
        rows_of(QUERY_AWARE, cells, answers, task.questions), BY_RATIO, task.questions
    )


def test_the_sign_test_counts_only_questions_that_one_of_the_two_answered():
    better, worse = np.array([1, 1, 1, 1, 1, 1, 0, 1, 0]), np.array([0, 0, 0, 0, 0, 0, 1, 1, 0])
    assert sign_test(better, worse) == (7 + 1) / 2**7  # six or seven of seven tosses
    assert sign_test(better[:5], worse) == 1 / 2**5
    assert sign_test(worse, worse) == 1


def test_a_refusal_is_reported_and_not_tried_again(task, answers, monkeypatch):
    def refuse(*given):
        raise kvcompress.KVCompressError("videos only")

    cells = cells_of(task, ["knorm"])
    with monkeypatch.context() as patch:
        patch.setattr(method_cells, "answer", refuse)
        compute(task, cells, answers)
    compute(task, cells, again(answers))
    assert set(again(answers).refused.values()) == {"videos only"}
    assert rows_of(QUERY_AWARE, cells, answers, task.questions) == {}


def test_a_method_that_is_refused_in_one_column_has_the_others(task, answers):
    cells = cells_of(task, ["knorm", "tova"])
    for cell in cells:
        answers.add(cell, [True, cell.method == "tova", False, False])
    answers.refuse(cells[3], kvcompress.KVCompressError("too few"))
    lines = lines_of(cells, answers, 4)
    assert [line.split(" | ")[0] for line in lines] == ["| tova", "| knorm"]
    assert [len(cell.strip()) > 0 for cell in lines[1].split("|")[2:-1]] == [True, True, True, False, False, False]


def test_a_table_of_decode_budgets_asks_every_method_that_evicts_while_decoding(task, answers):
    budgets = (Column("8 / 2", None, {"budget": 8, "decode_budget": 8, "decode_interval": 2}),)
    task = replace(task, protocols=(Protocol("decode budgets", {}, budgets),), new_tokens=6, has_images=True)
    cells = cells_of(task, ["full", "knorm", "fastv"])
    assert [(cell.method, cell.column.title) for cell in cells] == [("full", "full"), ("knorm", "8 / 2")]
    compute(task, cells, answers)
    assert all(len(answers.of(cell, 4)) == 4 for cell in cells)


def test_headroom_is_over_all_columns_between_random_and_hindsight(answers):
    cells = []
    for method, rights in {"hindsight": [90, 70, 60, 40], "random": [50, 30, 20, 0], "tova": [80, 50, 40, 10]}.items():
        for column, right in zip(BY_RATIO, rights, strict=True):
            cells.append(Cell(QUERY_AWARE, method, column))
            answers.add(cells[-1], [True] * right + [False] * (100 - right))
    lines = lines_of(cells, answers, 100)
    assert [line.split("|")[1].strip() for line in lines] == ["**hindsight**", "**random**", "tova"]
    assert [line.split("|")[-2].split(" [")[0].strip() for line in lines] == ["100", "0", "50"]


def test_what_a_cell_keeps_is_stored_by_layer_over_all_its_batches(task, answers, tmp_path):
    cells = cells_of(task, ["full", "knorm", "pyramidkv"])
    compute(task, cells, answers)
    kept = {(cell.method, cell.column.title): answers.kept.get(cell.key) for cell in cells}
    assert kept["full", "full"] is None
    assert all(0.5 <= share <= 0.5 + 1 / 30 for share in kept["knorm", "0.5"])  # the token that is fed again
    assert len(kept["pyramidkv", "0.2"]) == len(kept["knorm", "0.5"])
    batches = Answers(tmp_path / "batches.json", "even")
    batches.add(cells[1], [1, 0, 1], [[0.1, 0.2, 0.3], [0.4, 0.4, 0.4]])
    batches.add(cells[1], [1], [[0.6], [0.8]])
    assert Answers(batches.path, "even").kept[cells[1].key] == [0.3, 0.5]
    batches.add(cells[2], [1])
    batches.add(cells[2], [1], [[0.6], [0.8]])  # the first batch's share is not known
    assert cells[2].key not in batches.kept


def test_what_keeps_another_share_than_was_asked_says_so_and_stands_behind_the_others(answers):
    cells = []
    for method, right in {"hindsight": 90, "random": 10, "fastv": 80, "tova": 30}.items():
        for column in BY_RATIO:
            cells.append(Cell(QUERY_AWARE, method, column))
            shares = [1.0, 0.2, 0.2] if method == "fastv" else [column.ratio + 0.004] * 3
            answers.add(cells[-1], [True] * right + [False] * (100 - right), [[share] * 100 for share in shares])
    rows = rows_of(QUERY_AWARE, cells, answers, 100)
    lines = markdown(rows, BY_RATIO, 100).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["**hindsight**", "**random**", "tova", "fastv"]
    *_, mean, headroom, _ = lines[-1].split("|")
    assert "80 [72, 88] (0.467)" in lines[-1].split("|")[3]
    assert (mean.strip(), headroom.strip()) == ("80.0", "")
    assert "fastv (0.2) 1.000 in layer 0, 0.200 in layers 1 to 2" in method_table.by_layer(rows)


def test_the_interval_is_the_bootstrap_over_questions():
    right = np.array([1] * 60 + [0] * 40)
    estimate = Estimate.of(right)
    half = 1.96 * 100 * (0.6 * 0.4 / 100) ** 0.5
    assert estimate.mean == 60
    assert estimate.low == pytest.approx(60 - half, abs=1.5)
    assert estimate.high == pytest.approx(60 + half, abs=1.5)
    assert Estimate.of(right) == estimate


def test_the_table_is_sorted_and_marks_what_is_worse_than_random(answers):
    rights = {"full": 90, "random": 50, "knorm": 20, "snapkv": 80, "tova": 49}
    cells = []
    for method, right in rights.items():
        for column in (FULL,) if method == "full" else BY_RATIO:
            cells.append(Cell(QUERY_AWARE, method, column))
            answers.add(cells[-1], [True] * right + [False] * (100 - right))
    lines = lines_of(cells, answers, 100)
    assert [line.split(" | ")[0] for line in lines] == ["| **full**", "| **random**", "| snapkv", "| tova", "| knorm"]
    assert [line.count("▼") for line in lines] == [0, 0, 0, 0, len(RATIOS)]


def test_retrieval_questions_follow_their_number_and_ask_for_one_fact_of_the_text():
    examples = draw_examples(20)
    assert examples[:5] == draw_examples(5)
    assert len({example.context for example in examples}) == 20
    for example in examples:
        begin = example.question.split("According to the text: ")[1]
        assert example.context.count(begin) == 1
        assert f"{begin}{example.answer}." in example.context
        assert begin not in ". ".join(example.context.split(". ")[:OPENING])  # the text may be cut there


def test_the_share_of_a_repeated_list_counts_its_names_however_they_are_separated():
    names = draw_names(3)
    assert (len({*names}), names) == (40, draw_names(3))
    assert numbered(names).startswith(f"1. {names[0]}\n2. ")
    assert share_repeated(names, ", ".join(names)) == share_repeated(names, numbered(names)) == 1
    assert share_repeated(names, numbered(names[:10])) == 0.25


def test_a_method_that_needs_a_calibration_answers_where_there_is_one(task, answers, tmp_path):
    assert cells_of(task, ["q-filters"]) == []
    task = replace(task, calibrations=tmp_path)
    assert cells_of(task, ["q-filters"]) == []
    shutil.copy(calibration_file("q-filters", task.model), tmp_path / "q-filters.safetensors")
    cells = cells_of(task, ["q-filters"])
    compute(task, cells, answers)
    assert answers.refused == {}
    assert all(len(answers.of(cell, task.questions)) == task.questions for cell in cells)
    key = cells[0].key
    (tmp_path / "q-filters.safetensors").write_bytes(b"another")
    assert cells[0].key != key


def test_a_learned_method_answers_with_the_checkpoint_that_its_note_names(task, answers, tmp_path):
    task, checkpoint = replace(task, calibrations=tmp_path), checkpoint_for("kvzap", task.model)
    sha256 = digest(Path(checkpoint))
    note = {"checkpoint": str(tmp_path / "kvzap"), "sha256": sha256, "made by": "kvcompress train kvzap"}
    (tmp_path / "kvzap.json").write_text(json.dumps(note))
    cells = cells_of(task, ["kvzap"])
    with pytest.raises(FileNotFoundError, match="kvzap is missing: kvcompress train kvzap"):
        compute(task, cells, answers)
    (tmp_path / "kvzap").symlink_to(checkpoint)
    compute(task, cells, answers)
    assert all(len(answers.of(cell, task.questions)) == task.questions for cell in cells)
    key = cells[0].key
    (tmp_path / "kvzap.json").write_text(json.dumps(note | {"sha256": "2"}))
    assert cells[0].key != key
    with pytest.raises(kvcompress.KVCompressError, match=f"its SHA-256 is {sha256}; kvcompress train kvzap"):
        learned(tmp_path / "kvzap.json")
