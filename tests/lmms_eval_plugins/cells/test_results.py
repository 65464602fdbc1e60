"""Cells on disk: names that never collide, whole or absent, skipped only where complete and the same."""

import json
from dataclasses import replace

import pytest

from lmms_eval_plugins.cells import identity, results
from lmms_eval_plugins.cells.results import Cell

CELL = Cell("textvqa_val", "org/model", "snapkv", ratio=0.2)
FINGERPRINT = {"method": "snapkv", "code": "abc", "settings": {"limit": 2}}


def write(folder, fingerprint=FINGERPRINT, answers=("a", "b")):
    with results.new_cell(folder) as draft:
        results.write_cell(draft, {"fingerprint": fingerprint}, [{"answer": answer} for answer in answers])


def test_folder_has_the_documented_place(tmp_path):
    assert CELL.folder(tmp_path) == tmp_path / "textvqa_val" / "org__model" / "snapkv-0.2"
    cell = replace(CELL, options={"window_size": 8}, settings={"limit": 100, "dtype": "float32"})
    assert cell.folder(tmp_path).name == "snapkv-0.2-dtype=float32-limit=100-window_size=8"
    assert replace(CELL, ratio=None, budget=64).folder(tmp_path).name == "snapkv-budget=64"


@pytest.mark.parametrize(
    "change",
    [
        {"task": "docvqa_val"},
        {"model": "org/other"},
        {"method": "knorm"},
        {"ratio": 0.25},
        {"ratio": None, "budget": 2},
        {"options": {"window_size": 8}},
        {"settings": {"limit": 8}},
        {"settings": {"gen_kwargs": {"temperature": 0.5}}},
        {"settings": {"a": "x" * 400}},
        {"settings": {"a": "x" * 401}},
    ],
)
def test_different_settings_never_share_a_folder(tmp_path, change):
    folders = {CELL.folder(tmp_path), replace(CELL, settings={"a": "x" * 402}).folder(tmp_path)}
    assert replace(CELL, **change).folder(tmp_path) not in folders


def test_local_checkpoints_of_the_same_name_get_different_folders(tmp_path):
    names = {results.model_folder(str(tmp_path / parent / "runs" / "best")) for parent in ("one", "two")}
    assert len(names) == 2
    assert all(name.startswith("runs__best@") for name in names)


def test_names_hold_no_separator_or_blank(tmp_path):
    cell = replace(CELL, task="a/../b c", settings={"gen_kwargs": "x y/z"})
    assert len(cell.folder(tmp_path).relative_to(tmp_path).parts) == 3
    assert " " not in str(cell.folder(tmp_path).relative_to(tmp_path))


def test_complete_cell_is_skipped(tmp_path):
    write(tmp_path / "cell")
    assert results.incomplete_reason(tmp_path / "cell", FINGERPRINT) is None


def test_absent_cell_is_computed(tmp_path):
    assert results.incomplete_reason(tmp_path / "cell", FINGERPRINT) == "no results yet"


def test_changed_fingerprint_names_what_changed(tmp_path):
    write(tmp_path / "cell")
    reason = results.incomplete_reason(tmp_path / "cell", {**FINGERPRINT, "code": "other", "data": 1})
    assert reason == "changed since: code, data"


@pytest.mark.parametrize("name", [results.RESULTS_FILE, results.SAMPLES_FILE])
def test_missing_or_cut_file_makes_the_cell_incomplete(tmp_path, name):
    write(tmp_path / "cell")
    file = tmp_path / "cell" / name
    text = file.read_text()
    file.write_text(text[: len(text) - 4])
    assert "damaged" in results.incomplete_reason(tmp_path / "cell", FINGERPRINT)
    file.unlink()
    assert name in results.incomplete_reason(tmp_path / "cell", FINGERPRINT)


def test_wrong_number_of_samples_makes_the_cell_incomplete(tmp_path):
    write(tmp_path / "cell")
    samples = tmp_path / "cell" / results.SAMPLES_FILE
    samples.write_text(samples.read_text().splitlines(keepends=True)[0])
    assert "1 samples on disk where 2" in results.incomplete_reason(tmp_path / "cell", FINGERPRINT)


def test_failure_while_writing_leaves_the_old_cell_and_no_rest(tmp_path):
    write(tmp_path / "cell", answers=("old",))

    def interrupted():
        with results.new_cell(tmp_path / "cell") as draft:
            results.write_cell(draft, {}, [{"answer": "new"}])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["cell"]
    assert json.loads((tmp_path / "cell" / results.SAMPLES_FILE).read_text()) == {"answer": "old"}


def test_redone_cell_replaces_all_of_the_old_one(tmp_path):
    with results.new_cell(tmp_path / "cell") as draft:
        (draft / "submissions").mkdir()
        results.write_cell(draft, {}, [{"answer": "old"}])
    write(tmp_path / "cell")
    assert sorted(path.name for path in (tmp_path / "cell").iterdir()) == [
        results.RESULTS_FILE,
        results.SAMPLES_FILE,
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["cell"]


def test_unfinished_cells_are_not_loaded(tmp_path):
    write(tmp_path / "a")
    (tmp_path / ".unfinished-x").mkdir()
    (tmp_path / ".unfinished-x" / results.RESULTS_FILE).write_text("{}")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / results.SAMPLES_FILE).write_text("{}")
    assert [cell["n_samples"] for cell in results.load_cells(tmp_path)] == [2]


def test_code_identity_ignores_comments_and_sees_code(tmp_path):
    source = tmp_path / "method.py"
    source.write_text("x = 1\n")
    before = identity.code_identity(tmp_path)
    source.write_text("# a comment\nx  =  1\n")
    assert identity.code_identity(tmp_path) == before
    source.write_text("x = 2\n")
    assert identity.code_identity(tmp_path) != before


def own_class(source: str, line: int = 0) -> type:
    """A class that is defined in no file, as in a notebook."""
    namespace = {"__name__": "__main__"}
    exec("\n" * line + source, namespace)
    return namespace["Own"]


def test_class_identity_sees_the_code_of_a_class_of_ones_own_and_not_its_place():
    source = "class Own:\n    kept = 3\n    def score(self, keys, scale=2):\n        return keys * scale + 1\n"
    before = identity.class_identity(own_class(source), ("kvcompress",))
    assert identity.class_identity(own_class(source, line=7), ("kvcompress",)) == before
    for change in (("+ 1", "+ 2"), ("+ 1", "- 1"), ("kept = 3", "kept = 4"), ("scale=2", "scale=3"), ("* scale", "")):
        assert identity.class_identity(own_class(source.replace(*change)), ("kvcompress",)) != before
    assert identity.class_identity(list, ("kvcompress",)) == ""
    assert identity.class_identity(results.Cell, ("lmms_eval_plugins",)) == ""
