"""--use_cache: a batch is answered once for one identity, and only for it."""

import json
from pathlib import Path

import pytest

from lmms_eval_plugins.model.answer_store import AnswerStore
from tests.support.checkpoints import image, load_lm, requests

DOCS = [{"text": "what word is it?", "images": [image(0)]}, {"text": "which?", "images": [image(1)]}, {"text": "hello"}]


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_lm(checkpoint("qwen2-vl"), batch_size=2)


@pytest.fixture
def answered(loaded, tmp_path, monkeypatch):
    """(docs, identity, ...) -> answers, rows, and how many batches the model answered."""

    def answer(docs, identity=None, task="task", overlays=0, **kwargs):
        loaded.reset_rows()
        loaded.answer_store, loaded.overlays = AnswerStore(tmp_path, identity or {"cell": 1}), overlays
        calls, original = [], loaded.answering.answer
        with monkeypatch.context() as patch:
            patch.setattr(loaded.answering, "answer", lambda *args: calls.append(args) or original(*args))
            results = loaded.generate_until(requests(loaded, docs, task=task, **kwargs))
        return [result.text for result in results], loaded.gather_rows(), len(calls)

    yield answer
    loaded.answer_store, loaded.overlays = None, 0


def test_answers_and_measurements_of_an_earlier_run_are_taken_again(answered):
    first = answered(DOCS)
    again = answered(DOCS)
    assert (first[2], again[2]) == (2, 0)
    assert again[:2] == first[:2]
    assert all(first[0])


@pytest.mark.parametrize(
    ("change", "batches"),
    [
        ({"identity": {"cell": 2}}, 2),
        ({"task": "another"}, 2),
        ({"max_new_tokens": 3}, 2),
        ({"docs": [*DOCS[:2], {"text": "hallo"}]}, 1),
        ({"docs": [{**DOCS[0], "images": [image(9)]}, *DOCS[1:]]}, 1),
        ({"docs": [{**DOCS[0], "images": [image(0, 97, 64)]}, *DOCS[1:]]}, 1),
        ({"overlays": 3}, 2),  # which tokens were kept is not stored
        ({"padding": 1}, 1),  # it has no measurement
    ],
)
def test_what_changes_an_answer_is_answered_anew(answered, change, batches):
    answered(DOCS)
    assert answered(**{"docs": DOCS, **change})[2] == batches


def test_sampled_answers_are_never_taken_again(answered):
    assert [answered(DOCS, do_sample=True)[2] for _ in range(2)] == [2, 2]


def test_an_interrupted_run_goes_on_where_it_stopped_and_a_cut_line_is_answered_again(answered, tmp_path):
    expected = answered(DOCS)
    (file,) = tmp_path.rglob("*.jsonl")
    whole = file.read_bytes()
    first = whole.splitlines()[0]
    for damaged, lost in ((whole[:-40], 1), (first, 1), (first + b"\n[]\n\xff", 1), (b"\x00{}", 2)):
        file.write_bytes(damaged)
        answers, rows, batches = answered(DOCS)
        assert (answers, batches) == (expected[0], lost)
        assert [row["doc_id"] for row in rows] == [0, 1, 2]
        assert answered(DOCS)[2] == 0  # and what was answered again is stored
    assert "cell" in json.loads(next(tmp_path.rglob("identity.json")).read_text())


def test_a_relative_folder_stays_where_it_is_when_the_working_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = AnswerStore(Path("cache"), {"cell": 1})
    (tmp_path / "data").mkdir()
    monkeypatch.chdir("data")
    store.put("a", 1)
    assert AnswerStore(tmp_path / "cache", {"cell": 1}).get("a") == 1


def test_processes_read_what_all_have_written(tmp_path):
    AnswerStore(tmp_path, {"cell": 1}, rank=0).put("a", 1)
    AnswerStore(tmp_path, {"cell": 1}, rank=1).put("b", 2)
    store = AnswerStore(tmp_path, {"cell": 1})
    assert (store.get("a"), store.get("b"), store.get("c")) == (1, 2, None)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has such a file")
def test_a_full_disk_is_told_with_the_files_name(tmp_path):
    store = AnswerStore(tmp_path, {"cell": 1})
    store._file = Path("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        store.put("key", "value")
