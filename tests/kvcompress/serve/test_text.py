"""The text of an answer that comes token by token is that of all its tokens, up to a stop string."""

import time

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvcompress.serve.text import AnswerText
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT
from tests.support.examples import examples

TOKENIZER = AutoTokenizer.from_pretrained(TINY_CHECKPOINT)


class Bytes:
    """A tokenizer whose tokens are bytes, and that drops a space at the beginning as SentencePiece's do."""

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        return bytes(tokens).decode(errors="replace").removeprefix(" ")


class Cleaning:
    """A tokenizer that, unless told otherwise, takes out the space before an apostrophe, as BERT's do."""

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces=True):
        text = "".join(tokens)
        return text.replace(" '", "'") if clean_up_tokenization_spaces else text


def pieces(tokenizer, tokens, stops=()) -> tuple[list[str], AnswerText]:
    text, found = AnswerText(tokenizer, stops), []
    for end in range(1, len(tokens) + 1):
        found.append(text.add(tokens[:end]))
        if text.is_stopped:
            break
    return [*found, text.end(tokens[:end])], text


@given(tokens=st.lists(st.integers(0, len(TOKENIZER) - 1), min_size=1, max_size=30))
@examples(50)
def test_pieces_are_the_whole_text(tokens):
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces(TOKENIZER, tokens)[0]) == whole


@given(
    written=st.text("ab é日🙂", min_size=1, max_size=20),
    stops=st.lists(st.text("ab é日", min_size=1, max_size=4), max_size=3),
)
@examples(200)
def test_the_text_ends_before_the_first_stop_string_whatever_the_tokens(written, stops):
    found, text = pieces(Bytes(), list(written.encode()), stops)
    whole = written.removeprefix(" ")
    ends = [whole.find(stop) for stop in stops if stop in whole]
    assert text.is_stopped == bool(ends)
    shown = "".join(found)
    assert shown in ({whole[:end] for end in ends} or {whole})  # of those that overlap, the one that is complete first
    assert not any(stop in shown for stop in stops)


def test_no_letter_is_lost_to_a_tokenizer_that_takes_out_spaces():
    assert "".join(pieces(Cleaning(), ["dogs", " ", "'", "tails"])[0]) == "dogs 'tails"


def test_a_character_of_several_tokens_comes_whole_and_a_possible_stop_string_is_held():
    assert pieces(Bytes(), list("aé🙂".encode()))[0] == ["a", "", "é", "", "", "", "🙂", ""]
    assert pieces(Bytes(), list(b"abca"), ["abd"])[0] == ["", "", "abc", "", "a"]
    assert pieces(Bytes(), list(b"xabd!"), ["abd"])[0] == ["x", "", "", "", ""]


def test_a_stop_string_costs_no_more_than_the_text_it_is_looked_for_in():
    text, begun = AnswerText(Bytes(), ["x" * 10**6]), time.perf_counter()
    assert [text.add(list(b"xxa")), text.add(list(b"xxax")), text.end(list(b"xxax"))] == ["xxa", "", "x"]
    assert time.perf_counter() - begun < 1  # a beginning of every length would be half a terabyte at each token


def test_a_request_that_began_again_repeats_nothing():
    text, tokens = AnswerText(Bytes()), list(b"abcdefg")
    assert [text.add(tokens[:end]) for end in (2, 5, 1, 2, 3, 4, 5, 6)] == ["ab", "cde", "", "", "", "", "", "f"]
    assert text.end(tokens) == "g"
