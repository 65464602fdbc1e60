"""`AnswerText`: the text of an answer while its tokens come, up to a stop string."""

from collections.abc import Sequence
from typing import Any


class AnswerText:
    """Turns tokens into text piece by piece. Text that was returned is final.

    Attributes:
        is_stopped: whether a stop string has come; the text ends before it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, stops
        self._from = self._read = 0  # tokens that are decoded again as context, and tokens that are text already
        self._held = ""  # what may be the beginning of a stop string
        self.is_stopped = False

    def add(self, tokens: list[int]) -> str:
        """Return the new text of an answer with these tokens so far."""
        new = self._decoded(tokens)
        if not new or new.endswith("\ufffd"):  # nothing, or a character whose other bytes are still to come
            return ""
        self._from, self._read = self._read, len(tokens)
        return self._given(new)

    def end(self, tokens: list[int]) -> str:
        """Return the rest of the text, when there are no more tokens."""
        rest = self._given(self._decoded(tokens))
        return rest if self.is_stopped else rest + self._held

    def _decoded(self, tokens: list[int]) -> str:
        """Return the text after what has been read.

        A tokenizer may write a token differently at the beginning of a text, so the tokens before it are decoded with
        it; all of them at every step would take quadratic time."""
        if self.is_stopped or len(tokens) <= self._read:  # a request that began again is behind what was read
            return ""
        before, now = (
            self._tokenizer.decode(
                tokens[self._from : end], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            for end in (self._read, len(tokens))
        )
        return now[len(before) :]

    def _given(self, new: str) -> str:
        """Return what can be returned now that `new` follows."""
        text = self._held + new
        if found := [at for stop in self._stops if (at := text.find(stop)) >= 0]:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        held = max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:size])
            ),
            default=0,
        )
        given = text[: len(text) - held]
        self._held = text[len(given) :]
        return given
