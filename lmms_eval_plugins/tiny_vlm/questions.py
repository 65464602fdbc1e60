"""The questions for the bundled model, about one picture or about everything in a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

POST_PROMPT = "\nAnswer the question using a single word or phrase."  # lmms-eval's for textvqa_val
READ = "read"  # the kind of question with a long answer and no post prompt


@dataclass(frozen=True)
class Question:
    """A question and its answer.

    Attributes:
        kind: what the question maps to what: c2n a colour to a number, w2n a word to the number below it, t2c a text to
            a colour.
        via: in a question of two steps, the result of the first: the colour of a sign or the ordinal of a picture.
        holder: likewise, the sign or picture that holds the answer.
        sign: the colour of the sign in question, if the question names a text on it.
    """

    kind: str
    text: str
    answer: str
    via: str = field(default="", compare=False)
    holder: str = field(default="", compare=False)
    sign: str = field(default="", compare=False)


@dataclass(frozen=True)
class Example:
    pixels: np.ndarray  # (side, side, 3) uint8
    question: Question


@dataclass
class Shown:
    """A prompt before its question: pictures, then frames of a video, then text.

    Attributes:
        questions: questions that it answers, each with one answer.
        pictures: (side, side, 3) uint8 each, with `picture_labels` as in `tiny_vlm.signs.Scene`.
        frames: (frames, side, side, 3) uint8, or None, with `frame_labels` (frames, len(LABELS), FRAME_GRID,
            FRAME_GRID).
        before: (frames,) int64, 1 + index in COLORS of the sign shown before the current one, 0 for none.
        text: the text between media and question.
    """

    questions: list[Question]
    pictures: list[np.ndarray] = field(default_factory=list)
    picture_labels: list[np.ndarray] = field(default_factory=list)
    frames: np.ndarray | None = None
    frame_labels: np.ndarray | None = None
    before: np.ndarray | None = None
    text: str = ""

    @property
    def question(self) -> Question:
        """The only question."""
        (question,) = self.questions
        return question
