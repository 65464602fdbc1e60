"""Cells on disk: names that never collide, whole or absent, skipped only where complete and the same."""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmms_eval_plugins.cells import results
from lmms_eval_plugins.cells.kept_tokens_file import SURVIVORS_FILE
from lmms_eval_plugins.cells.plan import Job
from lmms_eval_plugins.cells.results import Cell
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.report.groups import cell_folders
from tests.support.result_cells import write_answers

CELL = Cell("textvqa_val", "org/model", "snapkv", ratio=0.2)
FINGERPRINT = {"method": "snapkv", "code": "abc", "settings": {"limit": 2}}


def content(fingerprint=FINGERPRINT):
    protocol = {"task": "t", "model": "m", "method": "snapkv", "ratio": 0.2, "budget": None}
    protocol |= {"settings": {}, "changed_options": {}}
    return {"protocol": protocol, "results": {}, "efficiency": {}, "fingerprint": fingerprint}


def samples(*answers):
    measured = dict.fromkeys(["ttft_s", "tpot_s", "tokens_in", "tokens_out", "vision_tokens", "kv_bytes_prompt"], 1)
    return [
        {"task": "t", "doc_id": number, "filtered_resps": [answer], "measurement": measured}
        for number, answer in enumerate(answers)
    ]


def write(folder, fingerprint=FINGERPRINT, answers=("a", "b")):
    with results.new_cell(folder) as draft:
        results.write_cell(draft, content(fingerprint), samples(*answers))


def answers(folder):
    return [sample["filtered_resps"][0] for sample in results.read_samples(folder)]


def test_folder_has_the_documented_place(tmp_path):
    assert CELL.folder(tmp_path) == tmp_path / "textvqa_val" / "org__model" / "snapkv-0.2"
    cell = replace(CELL, options={"window_size": 8}, settings={"limit": 100, "dtype": "float32"})
    assert cell.folder(tmp_path).name == "snapkv-0.2-dtype=float32-limit=100-window_size=8"
    assert replace(CELL, ratio=None, budget=64).folder(tmp_path).name == "snapkv-budget=64"


CHANGES = [
    {"task": "docvqa_val"}, {"model": "org/other"}, {"method": "knorm"}, {"ratio": 0.25},
    {"ratio": None, "budget": 2}, {"options": {"window_size": 8}}, {"settings": {"limit": 8}},
    {"settings": {"gen_kwargs": {"temperature": 0.5}}}, {"settings": {"a": "x" * 400}},
    {"settings": {"a": "x" * 401}}, {"settings": {"a": "é" * 400}}, {"ratio": 0.1234567}, {"ratio": 0.1234568},
    {"ratio": 0.123457}, {"options": {"alpha": 1e-7}}, {"options": {"alpha": 1.0000001e-7}},
    {"settings": {"system_prompt": "Really?"}}, {"settings": {"system_prompt": "Really!"}},
    {"settings": {"system_prompt": "Really_"}}, {"settings": {"system_prompt": "a/_b"}},
    {"settings": {"system_prompt": "a_/b"}}, {"settings": {"system_prompt": "a__b"}},
    {"settings": {"system_prompt": "x-seed=1"}}, {"settings": {"system_prompt": "x", "seed": "1"}},
    {"settings": {"gen_kwargs": {"a": "1,b=2"}}}, {"settings": {"gen_kwargs": {"a": "1", "b": "2"}}},
    {"model": "org__model"}, {"model": "."}, {"model": ".."}, {"model": "x" * 300}, {"task": "t" * 300},
    {"task": "t" * 301},
    {"settings": {"a": "x" * 402}}, *({"options": {"seed": n}, "settings": {"seed": "2,2,2,2"}} for n in (0, 1)),
]  # fmt: skip


def test_different_settings_never_share_a_folder(tmp_path):
    folders = [CELL.folder(tmp_path), *(replace(CELL, **change).folder(tmp_path) for change in CHANGES)]
    assert len(set(folders)) == len(folders)
    parts = {part for folder in folders for part in folder.relative_to(tmp_path).parts}
    assert all(len(part.encode()) <= 255 and part not in (".", "..") for part in parts)


def test_a_value_is_shortened_or_marked_only_where_the_name_would_not_tell_it():
    def name(**settings):
        return replace(CELL, settings=settings).folder(Path()).name

    plain = {
        "a": "auto", "b": 0.05, "c": 1e-05, "d": -1, "e": True, "f": "/x/y.jinja", "g": "0,1,2,3", "h": "a_b-c.d+e@f",
    }  # fmt: skip
    assert name(**plain) == "snapkv-0.2-a=auto-b=0.05-c=1e-05-d=-1-e=True-f=__x__y.jinja-g=0,1,2,3-h=a_b-c.d+e@f"
    assert name(k={"temperature": 0.5, "top_p": 1}) == "snapkv-0.2-k=temperature=0.5,top_p=1"
    assert re.fullmatch("snapkv-0.2-a=Really_@[0-9a-f]{8}", name(a="Really?"))
    assert name(a=name(a="Really?").removeprefix("snapkv-0.2-a=")) != name(a="Really?")
    assert re.fullmatch("snapkv-0.2-a=x{40}@[0-9a-f]{8}-b=1", name(a="x" * 101, b=1))


@given(st.lists(st.text("a1_-=,/.@? é", min_size=1, max_size=5), min_size=2, max_size=2, unique=True))
def test_any_two_texts_have_folders_of_their_own(texts):
    one, two = ({replace(CELL, **change).folder(Path()) for change in places(text)} for text in texts)
    assert not one & two


def places(text):
    """The cells of which `text` is a part."""
    settings = [{"a": text}, {"a": text, "b": "1"}, {"gen_kwargs": {"a": text}}, {"gen_kwargs": {"a": "1", "b": text}}]
    return [*({"settings": each} for each in settings), {"model": text}, {"task": text}]


def test_local_checkpoints_of_the_same_name_get_different_folders(tmp_path):
    names = {results.model_folder(str(tmp_path / parent / "runs" / "best")) for parent in ("one", "two")}
    assert len(names) == 2
    assert all(name.startswith("runs__best@") for name in names)


def test_names_hold_no_separator_or_blank(tmp_path):
    cell = replace(CELL, task="a/../b c", settings={"gen_kwargs": "x y/z"})
    assert len(cell.folder(tmp_path).relative_to(tmp_path).parts) == 3
    assert " " not in str(cell.folder(tmp_path).relative_to(tmp_path))


def test_a_complete_cell_is_skipped_and_else_the_reason_is_told(tmp_path):
    assert results.incomplete_reason(tmp_path / "cell", FINGERPRINT) == "no results yet"
    write(tmp_path / "cell")
    assert results.incomplete_reason(tmp_path / "cell", FINGERPRINT) is None
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


BROKEN = {
    results.RESULTS_FILE: [b"", b"[]", b"null", b"3", b"\xff\xfe\x00", b"{}", b"[" * 5000, b'{"protocol": []}'],
    results.SAMPLES_FILE: [
        b"", b"\n\n", b"\x89PNG\r\n\x00\xff\n\n", b"[]\n{}\n", b"{}\n{}\n", b'{"task": 1}\n' * 2, b"1\n2\n",
    ],
    SURVIVORS_FILE: [b"", b"[]\n", b"{}\n", b'{"asked": 1}\n{}\n', b"\xff"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "data"), [(name, data) for name, many in BROKEN.items() for data in many])
def test_a_damaged_cell_is_computed_again_and_the_reason_is_one_line(tmp_path, name, data):
    write(tmp_path / "cell")
    (tmp_path / "cell" / name).write_bytes(data)
    job = Job(CELL, {}, tmp_path / "cell", FINGERPRINT, 2, None, SimpleNamespace(request=parse([])))
    assert len(job.todo.splitlines()) == 1
    assert name in job.todo or "samples on disk, but 2 were evaluated" in job.todo
    write(tmp_path / "cell")
    assert job.incomplete is None


@pytest.mark.parametrize("part", ["protocol", "results", "efficiency", "n_samples", "fingerprint"])
def test_results_without_one_of_their_parts_are_damaged(tmp_path, part):
    write(tmp_path / "cell")
    file = tmp_path / "cell" / results.RESULTS_FILE
    file.write_text(json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != part}))
    assert results.incomplete_reason(tmp_path / "cell", FINGERPRINT) == f"results.json is damaged: no {part}"


def test_answers_with_any_character_are_read_back(tmp_path):
    text = "".join(map(chr, range(0x300))) + "\u2028\u2029\u4e2d"
    write(tmp_path / "cell", answers=(text, "b"))
    assert answers(tmp_path / "cell") == [text, "b"]
    assert results.incomplete_reason(tmp_path / "cell", FINGERPRINT) is None


def test_a_damaged_neighbour_is_left_out_and_named(tmp_path, capsys):
    write(tmp_path / "a")
    for name, data in (("b", b"[]"), ("c", b"\xff")):
        write(tmp_path / name)
        (tmp_path / name / results.RESULTS_FILE).write_bytes(data)
    assert len(results.load_cells(tmp_path)) == 1
    one, two = capsys.readouterr().err.splitlines()
    assert one == f"left out: {tmp_path / 'b'}: results.json is damaged: not an object but list"
    assert two.startswith(f"left out: {tmp_path / 'c'}: results.json is damaged: ")


def test_a_cell_that_several_runs_finish_at_once_is_one_of_theirs(tmp_path):
    errors, begin = [], threading.Barrier(4)

    def run(answer):
        begin.wait()
        try:
            for _ in range(20):
                write(tmp_path / "cell", answers=(answer, answer))
        except OSError as error:
            errors.append(error)

    runs = [threading.Thread(target=run, args=(str(number),)) for number in range(4)]
    for each in runs:
        each.start()
    for each in runs:
        each.join()
    assert not errors
    assert [path.name for path in tmp_path.iterdir()] == ["cell"]
    one, two = answers(tmp_path / "cell")
    assert one == two


def test_failure_while_writing_leaves_the_old_cell_and_no_rest(tmp_path):
    write(tmp_path / "cell", answers=("old",))

    def interrupted():
        with results.new_cell(tmp_path / "cell") as draft:
            results.write_cell(draft, content(), samples("new"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["cell"]
    assert answers(tmp_path / "cell") == ["old"]


def test_redone_cell_replaces_all_of_the_old_one(tmp_path):
    with results.new_cell(tmp_path / "cell") as draft:
        (draft / "submissions").mkdir()
        results.write_cell(draft, content(), samples("old"))
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


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_results_with_a_number_that_is_not_finite_are_damaged(tmp_path, value):
    with results.new_cell(tmp_path / "cell") as draft:
        results.write_cell(draft, {**content(), "efficiency": {"answers_per_s": value}}, [])
    with pytest.raises(results.DamagedFile, match=r"answers_per_s is .*finite"):
        results.read_results(tmp_path / "cell")


def test_cells_behind_symbolic_links_are_found_each_once(tmp_path):
    model = write_answers(tmp_path / "disk", "t", "knorm", 0.5, "abcx")
    root = tmp_path / "results"
    root.mkdir()
    (root / "t").symlink_to(tmp_path / "disk" / "t")
    (root / "too").symlink_to(tmp_path / "disk" / "t")
    (model / "up").symlink_to(root)
    assert results.result_folders(root) == cell_folders(root) == [root / "t" / "m" / "knorm-0.5"]
