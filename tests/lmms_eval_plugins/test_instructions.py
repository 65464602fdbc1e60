"""Several instructions at once: each check knows what follows it and what does not, and prompts can be followed."""

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest

from lmms_eval_plugins import evaluate
from lmms_eval_plugins.tasks import instructions
from lmms_eval_plugins.tasks.instructions import COUNTS, FILE, INSTRUCTIONS, QUESTIONS, draw_questions, fit, followed
from tests.support.checkpoints import save_checkpoint

TASK = "several_instructions"
CASES = [  # name, value, what follows it, what does not
    ("capitals", "", ["A DAY, 3 BIRDS."], ["A day", "123"]),
    ("lowercase", "", ["a day, 3 birds."], ["A day", "123"]),
    ("begin", "Indeed", ["Indeed, it is.", '"indeed it is"', "INDEED."], ["It is indeed", "Indeedly so", ""]),
    ("end", "today", ["We go today.", "TODAY!", "we go **today**"], ["today we go", "We go yesterday.today"]),
    ("keyword", "copper", ["A Copper, roof", "It is (copper)."], ["coppers", "bronze"]),
    ("forbidden", "the", ["A roof", "their other"], ["The roof", "on the."]),
    (
        "sentences",
        "2",
        ["One 3.5 m. Two!", 'He said "no." Then left?', "One... Two"],
        ["One.", "One. Two. Three.", "..."],
    ),
    ("bullets", "2", ["* a\n* b", "- a\n\n  - b"], ["* a", "*a\n*b", "* a\n* b\n* c", "**a**\n**b**"]),
    ("few_words", "4", ["one two three"], ["one two three four"]),
    ("no_commas", "", ["a; b"], ["a, b"]),
    ("title", "", ["<<A day>>\nIt was"], ["<A day>", "<<>>", "<<A\nday>>"]),
    ("postscript", "", ["It was.\nP.S. More", "p. s. more"], ["PS more", "UP.S."]),
    ("json", "", ['{"a": [1]}', '```json\n{"a": 1}\n```', "{}"], ["[1]", 'Here: {"a": 1}', "{'a': 1}", "[" * 99_999]),
]


@pytest.mark.parametrize(("name", "value", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_a_check_knows_what_follows_the_instruction_and_what_does_not(name, value, good, bad):
    doc = {"instructions": [name], "values": [value]}
    assert [followed(doc, answer) for answer in good] == [[True]] * len(good)
    assert [followed(doc, answer) for answer in bad] == [[False]] * len(bad)
    assert followed(doc, " \n") == [False]


def test_every_instruction_has_its_cases_and_excludes_known_ones():
    assert [case[0] for case in CASES] == list(INSTRUCTIONS)
    assert {name for one in INSTRUCTIONS.values() for name in one.excludes} <= INSTRUCTIONS.keys()
    assert fit(("capitals", "end"))
    assert not fit(("json", "end"))
    assert not fit(("end", "json"))


def test_prompts_have_two_to_five_different_instructions_that_fit_together():
    rows = draw_questions(QUESTIONS)
    assert Counter(len(row["instructions"]) for row in rows) == dict.fromkeys(COUNTS, QUESTIONS // len(COUNTS))
    used = Counter()
    for row in rows:
        assert len(set(row["instructions"])) == len(row["instructions"])
        assert fit(row["instructions"])
        _, *asked = row["prompt"].split("\n")
        assert asked == [
            f"- {INSTRUCTIONS[name].text.format(value)}"
            for name, value in zip(row["instructions"], row["values"], strict=True)
        ]
        used.update(row["instructions"])
    assert used.keys() == INSTRUCTIONS.keys()
    assert draw_questions(5) == rows[:5]
    assert draw_questions(5, seed="other") != rows[:5]


def test_the_scores_are_the_share_that_is_followed_and_whether_all_are():
    doc = {"instructions": ["capitals", "end", "no_commas", "few_words"], "values": ["", "today", "", "40"]}

    def scores(answer):
        found = instructions.process_results(doc, [answer])
        return [found[name] for name in ("instructions_followed", "demands_followed", "all_followed")]

    assert scores("WE GO TODAY.") == [1, 1, 1]
    assert scores("WE GO.") == [0.75, 0.5, 0]
    assert scores("Oh, we go.") == [0.25, 0, 0]
    assert scores("") == [0, 0, 0]


def test_what_a_meaningless_answer_follows_is_a_ban():
    """And a prompt of bans alone has no demands to score."""
    bans = [name for name, one in INSTRUCTIONS.items() if one.is_ban]
    assert bans == [name for name, value, *_ in CASES if INSTRUCTIONS[name].follows("Hm", value)]
    doc = {"instructions": bans, "values": ["the", "40", ""]}
    assert instructions.process_results(doc, ["Hm"]) == {"instructions_followed": 1, "all_followed": 1}


def test_the_bundled_file_is_what_is_drawn():
    drawn = [{**row, "instructions": list(row["instructions"])} for row in draw_questions(QUESTIONS)]
    assert pq.read_table(FILE).to_pylist() == drawn


@pytest.mark.usefixtures("clean_process", "plots_not_drawn")
def test_a_language_model_answers_it_through_the_plugin(tmp_path):
    save_checkpoint("llama", tmp_path / "model")
    argv = [TASK, str(tmp_path / "model"), "full,snapkv", "0.5", "--limit", "2", "--gen_kwargs", "max_new_tokens=3"]
    assert evaluate.main(argv) == 0
    files = sorted(tmp_path.glob(f"results/{TASK}/**/samples.jsonl"))
    assert len(files) == 2
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(rows) == 2
        assert all(0 <= row["instructions_followed"] <= 1 and row["all_followed"] in (0, 1) for row in rows)
