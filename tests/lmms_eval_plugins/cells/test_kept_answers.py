"""Answers that wait to be scored: used when they are whole and the same, else generated again."""

import json

import pytest

from lmms_eval_plugins.cells.kept_answers import KeptAnswers, answers_file, read_kept_answers, write_kept_answers

ROW = {"task": "t", "doc_id": 0, "answer": "red"}
FINGERPRINT = {"code": "abc"}


@pytest.fixture
def cell(tmp_path):
    write_kept_answers(tmp_path / "cell", FINGERPRINT, KeptAnswers([ROW], {"device": "cpu"}, overlays=2))
    return tmp_path / "cell"


def test_what_was_written_is_read(cell):
    assert read_kept_answers(cell, FINGERPRINT, 2) == KeptAnswers([ROW], {"device": "cpu"}, 2)
    assert read_kept_answers(cell, FINGERPRINT, 3) is None
    assert read_kept_answers(cell, {"code": "abd"}, 0) is None


@pytest.mark.parametrize("part", ["fingerprint", "rows", "environment", "overlays"])
@pytest.mark.parametrize("damage", ["absent", None, [{"task": "t"}], [ROW, None], "text"])
def test_damaged_answers_do_not_count(cell, part, damage):
    content = json.loads(answers_file(cell).read_text())
    if damage == "absent":
        del content[part]
    else:
        content[part] = damage
    answers_file(cell).write_text(json.dumps(content))
    assert read_kept_answers(cell, FINGERPRINT, 1) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff\xfe", b'{"rows"'])
def test_a_damaged_file_does_not_count(cell, content):
    answers_file(cell).write_bytes(content)
    assert read_kept_answers(cell, FINGERPRINT, 0) is None
