"""Draw prompts with long answers: every sign of a picture, from left to right."""

from __future__ import annotations

from random import Random

from lmms_eval_plugins.tiny_vlm.questions import READ, Question, Shown
from tiny_vlm.regimes.words import WORDS
from tiny_vlm.signs import COLORS, DIGITS, LETTERS, Canvas, Sign, new_text

KINDS = (READ,)
QUESTION = "read every sign from left to right."
TOKENS = (24, 96)  # fewest and most of an answer, including its end token


def draw(rng: Random, signs: tuple[int, int] = (4, 8), tokens: tuple[int, int] = TOKENS) -> Shown:
    """Draw a picture and its one question; `signs`: fewest and most, with left edges at least a patch apart."""
    while True:
        canvas = Canvas(rng)
        canvas.gradient()
        canvas.boxes(rng.randint(0, 3))
        taken: list[str] = []
        placed: dict[int, Sign] = {}  # by left edge
        for color in rng.sample(list(COLORS), rng.randint(*signs)):
            word, number = new_text(rng, LETTERS, taken, WORDS), new_text(rng, DIGITS, taken)
            lines = rng.choice([(word,), (number,), (word, number), (word, number)])
            place = canvas.free_place(lines, apart=list(placed))
            if place is None:
                continue
            canvas.write(place, lines, color)
            taken += lines
            placed[place[0]] = Sign(color, lines)
        ordered = [placed[left] for left in sorted(placed)]
        if tokens[0] <= answer_tokens(ordered) <= tokens[1]:
            break
    canvas.noise(most=2)
    answer = ", ".join(" ".join((sign.color, *sign.lines)) for sign in ordered)
    return Shown([Question(READ, QUESTION, answer)], [canvas.bytes()], [canvas.labels])


def answer_tokens(signs: list[Sign]) -> int:
    """Count an answer's tokens: each colour with its leading space, character, space and comma, and the end token."""
    return sum(2 + sum(1 + len(line) for line in sign.lines) for sign in signs)
