"""What the bundled model is asked: a question, about one picture or about all that a prompt shows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

POST_PROMPT = "\nAnswer the question using a single word or phrase."  # lmms-eval's for textvqa_val
READ = "read"  # the kind of question that has a long answer, and no post prompt


@dataclass(frozen=True)
class Question:
    """`kind` says what leads to what: c2n colour to number, w2n word to number below it, t2c text to colour. Where
    the answer takes two steps, `via` is what the first one finds, the colour of a sign or the ordinal of a picture, and
    `holder` the same of where the answer stands; `sign` is the colour of the one sign that is about, where the question
    names a text on it."""

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
    """Pictures, then frames of a video, then text, as a prompt shows them before its question.

    Attributes:
        questions: all that it answers; each has one answer.
        pictures: (side, side, 3) uint8 each, with `picture_labels` as in `tiny_vlm.signs.Scene`.
        frames: (frames, side, side, 3) uint8, or None, with `frame_labels` (frames, len(LABELS), FRAME_GRID,
            FRAME_GRID).
        before: (frames,) int64, 1 + index in COLORS of the sign that was shown before the present one, 0 for none.
        text: what stands between them and the question.
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
        """The only one."""
        (question,) = self.questions
        return question
