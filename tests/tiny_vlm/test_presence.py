"""Negative questions: half are answered by no, no form or colour tells which, and the bundled file is what is drawn."""

import io
import re
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells.data import find_tasks
from lmms_eval_plugins.tasks import presence as scoring
from tests.support.checkpoints import save_checkpoint
from tiny_vlm.presence import FILE, PICTURES, TASK, draw_pictures


def test_a_question_is_answered_by_yes_exactly_where_a_sign_of_the_picture_has_what_it_asks_for():
    for scene, questions in draw_pictures(40):
        colors = {sign.color for sign in scene.signs}
        lines = {line.upper() for sign in scene.signs for line in sign.lines}
        assert sorted(question.kind for question in questions) == ["absent", "present"]
        for question in questions:
            asked = re.fullmatch(r"Is there (?:an? (\w+) sign|a sign that says (\w+))\?", question.text)
            there = asked[1] in colors if asked[1] else asked[2] in lines
            assert question.answer == ("yes" if there else "no")
            assert (question.kind == "present") == there


def test_neither_place_nor_form_tells_the_answer():
    asked = [questions for _, questions in draw_pictures(200)]
    first = Counter(questions[0].answer for questions in asked)
    assert 70 <= first["yes"] <= 130
    text = [(re.search(r"says (\w)", one.text), one.answer) for questions in asked for one in questions]
    digits = Counter(answer for found, answer in text if found and found[1].isdigit())
    letters = Counter(answer for found, answer in text if found and found[1].isalpha())
    assert all(30 <= count[answer] <= 70 for count in (digits, letters) for answer in ("yes", "no"))


def test_the_bundled_file_is_what_is_drawn_half_yes_and_half_no():
    rows = pq.read_table(FILE).to_pylist()
    drawn = [(scene, question) for scene, questions in draw_pictures(PICTURES) for question in questions]
    assert [(row["question"], row["answer"], row["task"]) for row in rows] == [
        (question.text, question.answer, question.kind) for _, question in drawn
    ]
    assert Counter(row["answer"] for row in rows) == {"yes": PICTURES, "no": PICTURES}
    for row, (scene, _) in list(zip(rows, drawn, strict=True))[:20]:
        (image,) = row["image_list"]
        pixels = np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("RGB")).astype(int)
        assert np.abs(pixels - scene.pixels).mean() < 10  # WebP


@pytest.mark.parametrize(
    ("answer", "said", "score"),
    [
        ("yes", "Yes.", 1),
        ("yes", " yes, there is", 1),
        ("yes", "**Yes**", 1),
        ("no", "No, there is no red sign", 1),
        ("no", "Yes", 0),
        ("no", "nothing", 0),
        ("no", "There is no red sign", 0),
        ("yes", "", 0),
    ],
)
def test_the_first_word_is_the_answer_and_counts_for_its_kind(answer, said, score):
    kind = "present" if answer == "yes" else "absent"
    assert scoring.process_results({"answer": answer, "task": kind}, [said]) == {"exact_match": score, kind: score}


def test_pictures_are_shown_larger_and_the_text_keeps_its_capitals():
    tasks = pytest.importorskip("lmms_eval.tasks").get_task_dict([TASK], find_tasks([TASK]), "chat")
    docs = tasks[TASK].test_docs()
    assert len(docs) == 2 * PICTURES
    assert tasks[TASK].doc_to_visual(docs[0])[0].size == (468, 468)
    asked = [tasks[TASK].doc_to_text(docs[place]) for place in range(4)]
    assert asked[0] == f"{docs[0]['question']}\nAnswer yes or no."
    assert re.search("says [A-Z0-9]+\\?", asked[2])


def test_another_model_answers_it_through_the_plugin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_checkpoint("qwen2-vl", tmp_path / "model")
    argv = [TASK, str(tmp_path / "model"), "snapkv", "0.2", "--limit", "3", "first_token=compressed"]
    assert evaluate.main([*argv, "--gen_kwargs", "max_new_tokens=2"]) == 0
    assert len(list(tmp_path.glob(f"results/{TASK}/**/results.json"))) == 1
