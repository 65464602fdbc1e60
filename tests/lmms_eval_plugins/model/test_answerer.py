"""Answers of an earlier run are given to lmms-eval once more, each to its question."""

from types import SimpleNamespace

from lmms_eval_plugins.model import answerer
from lmms_eval_plugins.model.answerer import AnsweredLM
from lmms_eval_plugins.model.arguments import ModelArguments


def request(doc_id: int, padding: bool = False) -> SimpleNamespace:
    return SimpleNamespace(args=("", None, {}, doc_id, "t", "test"), metadata={"__padding_only__": padding})


def row(doc_id: int, answer: str, number: int = 0) -> dict:
    return {"task": "t", "doc_id": doc_id, "round": number, "answer": answer, "tokens_in": 5, "tokens_out": 2}


def test_a_question_that_is_asked_twice_gets_its_answers_in_their_order():
    lm = AnsweredLM(ModelArguments(pretrained="m"), [row(1, "b"), row(0, "a"), row(1, "c")])
    given = lm.generate_until([request(0), request(1), request(1), request(1, padding=True)])
    assert [result.text for result in given] == ["a", "b", "c", ""]
    assert (given[0].token_counts.input_tokens, given[0].token_counts.output_tokens) == (5, 2)


def test_the_rows_of_an_earlier_run_are_already_those_of_all_ranks(monkeypatch):
    lm = AnsweredLM(ModelArguments(pretrained="m"), [row(1, "b"), row(0, "a")])
    monkeypatch.setattr(lm, "_world_size", 2)  # as lmms-eval sets it
    monkeypatch.setattr(answerer, "of_each_rank", lambda rows: [rows, rows])
    assert lm.gather_rows() == [row(0, "a"), row(1, "b")]


def test_a_question_of_several_rounds_gets_one_answer_for_each():
    rows = [row(0, "a"), row(0, "b", 1), row(0, "c"), row(0, "d", 1), row(1, "e")]
    lm = AnsweredLM(ModelArguments(pretrained="m"), rows)
    asked = [request(0), request(0), request(1), request(1, padding=True)]
    assert lm.generate_until_multi_round(asked) == [["a", "b"], ["c", "d"], ["e"], [""]]
