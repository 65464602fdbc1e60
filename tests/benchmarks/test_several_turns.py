"""Several turns on one text: one compression, every turn from the same cache, and what a table says of them."""

import json
import re

import pytest
import torch

import kvcompress
from benchmarks import several_turns
from benchmarks.conversations import NEEDLES, RECORDS, TURNS, Conversation, Turn, draw_conversations
from benchmarks.several_turns import AWARE, PROTOCOLS, Asked, Tokens, answer_turns, tables
from tests.support.calibrations import calibration_of
from tests.support.examples import paired
from tests.support.families import FAMILIES
from tests.support.strategies import METHODS

NEW = 3  # tokens of an answer


@pytest.fixture(scope="module")
def model():
    return FAMILIES["llama"].build()


@pytest.fixture(scope="module")
def tokens(model):
    """A conversation whose answers are those of the model itself, without compression."""
    ids = FAMILIES["llama"].inputs(model, [60])["input_ids"][0].tolist()
    said, turns = ids[:40], []
    for start in (40, 45, 52):
        question = ids[start : start + 5]
        said = said + question
        answer = model.generate(torch.tensor([said]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        turns.append((question, answer[0, len(said) :].tolist()))
        said = said + turns[-1][1]
    return Tokens(ids[:40], turns)


# -- the conversations


def test_every_answer_stands_in_the_text_behind_its_question_and_nowhere_else():
    for talk in draw_conversations(6):
        facts = re.findall(r"(The (?:door code of|locker number of) [\w ]+ is)( \d+)\.", talk.context)
        assert len(dict(facts)) == len({number for _, number in facts}) == NEEDLES + RECORDS
        asked = [turn.question.removeprefix("\n\nAccording to the text: ") for turn in talk.turns]
        assert len(set(asked)) == TURNS
        assert [turn.answer for turn in talk.turns] == [dict(facts)[beginning] for beginning in asked]
        assert all(("door" in turn.question) == (turn.kind == "needle") for turn in talk.turns)


def test_each_turn_asks_about_both_kinds_equally_often_and_more_texts_only_add():
    talks = draw_conversations(4)
    assert [[talk.turns[place].kind for talk in talks].count("needle") for place in range(TURNS)] == [2] * TURNS
    assert draw_conversations(2) == talks[:2]
    assert draw_conversations(2, seed="other") != talks[:2]


# -- the answers


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("method", "ratio"), [("full", None), ("knorm", 1.0)])
def test_what_keeps_everything_answers_every_turn_as_generate_does(model, tokens, protocol, method, ratio):
    right, kept, _ = answer_turns(model, tokens, protocol, method, ratio)
    assert right == [True] * 3
    assert kept == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("place", range(NEW))
def test_one_wrong_token_makes_its_own_turn_wrong(model, tokens, protocol, place):
    question, answer = tokens.turns[-1]
    answer = [*answer]
    answer[place] += 1 if answer[place] < 50 else -1
    wrong = Tokens(tokens.context, [*tokens.turns[:-1], (question, answer)])
    assert answer_turns(model, wrong, protocol, "full", None)[0] == [True, True, False]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("method", ["snapkv", "random"])
def test_every_turn_is_answered_as_on_a_compressed_cache_of_its_own(model, tokens, protocol, method):
    """What generate answers, on a cache that no other turn has seen, is right; the true answer mostly is not."""
    first = tokens.first_prompt(protocol)
    options = {"scope": "context", "context_tokens": len(first)}
    options |= {"first_token": "compressed"} if protocol == AWARE else {}
    said, trues = list(tokens.context), []
    for place, (question, answer) in enumerate(tokens.turns):
        said = said + question
        with torch.no_grad(), kvcompress.compress(model, method, 0.2, **options) as session:
            begun = {}
            if len(first) < len(said):
                model(torch.tensor([first]))
                begun = {"past_key_values": session.cache}
            length = {"max_new_tokens": NEW, "min_new_tokens": NEW}
            output = model.generate(torch.tensor([said]), **begun, **length, do_sample=False)
        theirs = output[0, len(said) :].tolist()
        trues.append(theirs == answer)
        given = Tokens(tokens.context, [*tokens.turns[:place], (question, theirs)])
        assert answer_turns(model, given, protocol, method, 0.2)[0][place]
        said = said + answer
    assert answer_turns(model, tokens, protocol, method, 0.2)[0] == trues
    assert not all(trues)


@pytest.mark.parametrize(("method", "protocol"), paired(METHODS, PROTOCOLS))
def test_every_kv_method_answers_and_keeps_its_share_of_the_first_prompt(model, tokens, protocol, method):
    right, kept, _ = answer_turns(model, tokens, protocol, method, 0.5, **calibration_of(method, model))
    assert len(right) == 3
    assert 0.3 < kept < 0.7


def test_a_prefill_that_is_shared_gives_the_same_answers_as_one_of_ones_own(model, tokens):
    alone = answer_turns(model, tokens, AWARE, "snapkv", 0.2)
    _, _, known = answer_turns(model, tokens, AWARE, "knorm", 0.5)
    assert known is not None
    assert answer_turns(model, tokens, AWARE, "snapkv", 0.2, known)[:2] == alone[:2]


# -- the records and the table


def test_a_method_that_refuses_is_named_in_the_table_and_the_others_have_their_rows(model, tokens):
    asked = Asked(model, [tokens, tokens])
    records = [
        record
        for protocol in PROTOCOLS
        for method, ratio in (("full", None), ("q-filters", 0.5))
        for record in asked.measured(protocol, method, ratio)
    ]
    assert [record.get("right") for record in records] == [["111", "111"], None] * 2
    talk = Conversation("", tuple(Turn(kind, "", "") for kind in ("needle", "record", "needle")))
    parts = list(tables(records, [talk, talk]))
    assert sum(part.startswith("## ") for part in parts) == 2
    assert sum(part.startswith("Not q-filters at 0.5: ") and "calibration" in part for part in parts) == 2


def test_the_table_has_the_accuracy_of_each_turn_and_kind():
    talks = [Conversation("", (Turn(one, "", ""), Turn(other, "", ""))) for one, other in 2 * [("n", "r"), ("r", "n")]]
    cell = {"protocol": AWARE, "ratio": 0.5, "kept": 0.5}
    worse = {**cell, "method": "worse", "right": ["10", "00", "00", "00"]}
    better = {**cell, "method": "better", "right": ["10", "11", "10", "10"]}
    _, text = tables([worse, better], talks)
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert rows[0][:7] == ["better", "0.5", "0.50", "100", "25", "75", "50"]
    assert rows[0][7].startswith("62 [50, ")
    assert [row[0] for row in rows] == ["better", "worse"]


def test_the_command_writes_its_table_and_goes_on_where_it_was(tmp_path, model, monkeypatch, capsys):
    class Characters:
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [20 + ord(one) % 50 for one in text[-90:]]}

    monkeypatch.setattr(several_turns, "load_named", lambda name: (model, Characters()))
    out = tmp_path / "turns"
    words = ["--contexts", "2", "--out", str(out), "--resume"]
    several_turns.main([*words, "--methods", "full", "--protocols", AWARE])
    first = json.loads(out.with_suffix(".json").read_text())["records"]
    monkeypatch.setattr(several_turns, "draw_conversations", lambda count: draw_conversations(count)[::-1])
    several_turns.main([*words, "--methods", "full", "knorm", "--ratios", "0.5"])
    records = json.loads(out.with_suffix(".json").read_text())["records"]
    assert records[:1] == first
    assert [(record["protocol"], record["method"]) for record in records[1:]] == [
        ("query-agnostic", "full"),
        ("query-agnostic", "knorm"),
        (AWARE, "knorm"),
    ]
    assert all(re.fullmatch("[01]{5}", right) for record in records for right in record["right"])
    assert "| knorm | 0.5 | 0.5" in out.with_suffix(".md").read_text()
    capsys.readouterr()


@pytest.mark.parametrize("name", ["fastv", "knrom"])
def test_what_is_no_kv_method_is_one_clear_error(name):
    with pytest.raises(kvcompress.KVCompressError, match=f"'{name}' is not a KV method"):
        several_turns.main(["--methods", name])
