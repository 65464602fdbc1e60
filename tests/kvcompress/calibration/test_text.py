"""Prompts from a text."""

from types import SimpleNamespace

import pytest

from kvcompress.calibration.text import pieces


class Letters:
    """A tokenizer with a token per letter, and a beginning of text."""

    bos_token_id = 1

    def __call__(self, text, add_special_tokens=True, **kwargs):
        return SimpleNamespace(input_ids=[1] * add_special_tokens + [ord(letter) for letter in text])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("abcdef", ["abc", "def"]), ("abcdefgh", ["abc", "def"]), ("ab", ["ab"])],
    ids=["the last piece is whole", "a rest is dropped", "the rest is all there is"],
)
def test_a_text_is_cut_into_whole_pieces_each_with_its_beginning(tmp_path, text, expected):
    file = tmp_path / "book.txt"
    file.write_text(text)
    found = [prompt["input_ids"][0].tolist() for prompt in pieces(file, Letters(), 4, 9, seed=0)]
    assert found == [[1, *map(ord, piece)] for piece in expected]
