"""What a prompt shows before its question, and the words that questions are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lmms_eval_plugins.tiny_vlm.signs import PROMPT_WORDS, Question

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
# Words of all prompts: one token each. The tokenizer of a checkpoint that answers these is built from this list.
WORDS = (
    *PROMPT_WORDS,
    *("read", "every", "from", "left", "to", "right", "of", "picture", "which", "with", "followed", "came", "before"),
    *("was", "fact", "has"),
    *ORDINALS,
)


@dataclass
class Shown:
    """Pictures, then frames of a video, then text, as a prompt shows them before its question.

    Attributes:
        questions: all that it answers; each has one answer.
        pictures: (SIDE, SIDE, 3) uint8 each, with `picture_labels` as in `signs.Scene`.
        frames: (frames, CLIP_SIDE, CLIP_SIDE, 3) uint8, or None, with `frame_labels` (frames, len(LABELS), FRAME_GRID,
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
