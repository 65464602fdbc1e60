"""Questions about one picture: what their prompts begin with is prefilled once, for all questions and cells."""

from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset, Image, List, Value

from lmms_eval_plugins.model.measurements import summarise
from lmms_eval_plugins.model.shared_media import SharedMedia, media_columns
from tests.support.checkpoints import answer, image, load_lm, requests

DOCS = [{"text": f"what word is on sign {n} of all?", "images": [image(n % 2)]} for n in range(6)]
CELLS = [{"method": "snapkv", "ratio": 0.3}, {"method": "knorm", "ratio": 0.3}, {"method": "fastv", "ratio": 0.5}]
SIZES = pytest.mark.parametrize("size", [{}, {"batch_size": 2}, {"slots": 2}], ids=["one by one", "batch", "in flight"])


def answers(lm, cell, docs=DOCS):
    return answer(lm, cell, docs, max_new_tokens=4)


@SIZES
def test_answers_are_the_same_and_rows_say_how_much_was_known(checkpoint, size):
    plain, shared = (load_lm(checkpoint("qwen2-vl"), **size, prefix_cache_gb=gigabytes) for gigabytes in (0, 1))
    for cell in CELLS:
        expected, plain_rows = answers(plain, cell)
        found, rows = answers(shared, cell)
        assert found == expected
        assert [row["realised_ratio"] for row in rows] == [row["realised_ratio"] for row in plain_rows]
        assert {row["reused_tokens"] for row in plain_rows} == {None}
        assert not any(row["prompt_is_known"] for row in rows)
        reused = [row["reused_tokens"] for row in rows]
        if cell["method"] == "fastv":  # drops tokens on the way
            assert set(reused) == {0}
        elif cell["method"] == "snapkv":
            assert sum(known > rows[0]["vision_tokens"] for known in reused) >= 2
        else:  # the cell before has answered the same; a cell's first batch passes whole
            known = [row for row in rows if row["reused_tokens"] == row["tokens_in"] - 1]
            assert len(known) >= 6 - size.get("batch_size", 1)
        assert summarise(rows)["reused_share"] == sum(reused) / sum(row["tokens_in"] for row in rows)


@pytest.mark.parametrize("size", [{}, {"slots": 2}], ids=["one by one", "in flight"])
def test_a_context_compressed_first_is_read_once_for_all_of_its_questions(checkpoint, size):
    plain, shared = (load_lm(checkpoint("qwen2-vl"), **size, prefix_cache_gb=gigabytes) for gigabytes in (0, 1))
    cell = {"method": "kvzip", "ratio": 0.3, "scope": "context-first"}
    (expected, plain_rows), (found, rows) = answers(plain, cell), answers(shared, cell)
    assert found == expected
    assert [row["realised_ratio"] for row in rows] == [row["realised_ratio"] for row in plain_rows]
    known = [row["reused_tokens"] for row in rows if row["reused_tokens"]]
    assert len(known) >= 3
    assert min(known) > rows[0]["vision_tokens"]


@SIZES
def test_what_was_spared_is_not_timed_and_what_ran_is(checkpoint, size):
    lm = load_lm(checkpoint("qwen2-vl"), **size, prefix_cache_gb=1)
    for cell in CELLS[:2]:
        _, rows = answers(lm, cell)
        for row in rows:
            assert (row["ttft_s"] is None) == (row["reused_tokens"] > 0)
        summary = summarise(rows)
        assert "answers_per_s" not in summary
        if "slots" not in size:
            assert summary["ttft_s"]["median"] > 0  # the first batch's


def test_questions_about_one_picture_are_asked_one_after_the_other(checkpoint, monkeypatch):
    lm = load_lm(checkpoint("qwen2-vl"), batch_size=1, prefix_cache_gb=1)
    asked, prepare = [], lm.prepare
    monkeypatch.setattr(lm, "prepare", lambda group, *more, **kw: asked.append(group[0].args[3]) or prepare(group))
    docs = [{**doc, "text": doc["text"] + " please" * (n == 3)} for n, doc in enumerate(DOCS)]
    texts, _ = answers(lm, CELLS[0], docs)
    assert asked == [3, 1, 5, 0, 2, 4]  # the longest prompt first, then those with its picture
    assert texts == answers(load_lm(checkpoint("qwen2-vl"), prefix_cache_gb=0), CELLS[0], docs)[0]


@pytest.mark.parametrize(
    ("size", "pictures", "is_on"), [({"slots": 2}, 2, True), ({"slots": 2}, 6, False), ({"batch_size": 1}, 2, False)]
)
def test_it_is_on_where_many_questions_share_few_pictures(checkpoint, size, pictures, is_on):
    lm = load_lm(checkpoint("qwen2-vl"), **size)
    docs = [{**doc, "images": [image(n % pictures)]} for n, doc in enumerate(DOCS)]
    _, rows = answers(lm, CELLS[0], docs)
    assert [row["reused_tokens"] is not None for row in rows] == [is_on] * 6


def test_another_task_begins_with_nothing(checkpoint):
    lm = load_lm(checkpoint("qwen2-vl"), prefix_cache_gb=1)
    answers(lm, CELLS[0])
    before = lm.answering.prefixes
    lm.generate_until(requests(lm, DOCS, task="other", max_new_tokens=2))
    assert lm.answering.prefixes is not before


def test_equal_media_of_a_data_set_are_known_without_decoding_them():
    features = {"id": Value("int64"), "picture": Image(), "more": List(Image())}
    assert media_columns(Dataset.from_dict({"id": [1]}).features) == []
    pictures = [np.full((4, 4, 3), value, np.uint8) for value in (1, 2)]
    rows = {"id": [0, 1, 2, 3], "picture": [pictures[0], pictures[0], pictures[1], None]}
    docs = Dataset.from_dict({**rows, "more": [[], [], [pictures[0]], []]}).cast_column("picture", Image())
    docs = docs.cast_column("more", List(Image()))
    assert media_columns(docs.features) == ["picture", "more"] == media_columns({**features})

    asked = requests(SimpleNamespace(task_dict={}), [{"text": "?"}] * 4)
    media = SharedMedia(asked, {"task": {"test": docs}})
    groups = media.groups(asked)
    assert groups[0] == groups[1]
    assert len(set(groups)) == 3  # a document without media is a group of its own
    assert [request.args[3] for request in sorted(asked, key=media.together(asked, lambda _: 0))] == [0, 1, 2, 3]


@SIZES
def test_rows_say_which_questions_show_the_same(checkpoint, size):
    lm = load_lm(checkpoint("qwen2-vl"), **size)
    for cell in CELLS[:2]:  # the second finds its batches prepared
        _, rows = answers(lm, cell, [*DOCS, {"text": "what is a word?", "images": []}])
        shows = [row["shows"] for row in sorted(rows, key=lambda row: row["doc_id"])]
        assert shows == [*shows[:2] * 3, ""]
        assert len(set(shows)) == 3
