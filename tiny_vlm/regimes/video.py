"""Draw clips in which signs come and go one after another."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np

from lmms_eval_plugins.tiny_vlm.questions import Question, Shown
from tiny_vlm.regimes.words import WORDS
from tiny_vlm.signs import COLORS, DIGITS, FRAME_GRID, LETTERS, PATCH, Canvas, Sign, new_text

KINDS = ("next", "previous", "v2n", "v2w")  # number to the next or previous number; colour to number, to word
SHORTEST_SHOW = 2  # frames
JITTER = 2  # pixels off the grid of the pooled tokens, at most


def draw(
    rng: Random,
    frames: tuple[int, int] = (8, 32),
    signs: tuple[int, int] = (3, 8),
    jitter: int = JITTER,
) -> Shown:
    """Draw a clip; `frames`, `signs`: fewest and most. Each sign has its own colour, a number and, in half the cases, a
    word above it. It stands still for at least SHORTEST_SHOW frames, up to `jitter` pixels off the pooled tokens' grid.
    """
    total = rng.randint(*frames)
    count = min(rng.randint(*signs), total // SHORTEST_SHOW)
    background = Canvas(rng, FRAME_GRID)
    background.gradient()
    background.boxes(rng.randint(0, 3))
    shows, gaps = _durations(rng, total, count)
    taken: list[str] = []
    shown: list[Sign] = []
    pixels, labels, before = [], [], []
    for color, duration, gap in zip(rng.sample(list(COLORS), count), shows, gaps, strict=True):
        word, number = new_text(rng, LETTERS, taken, WORDS), new_text(rng, DIGITS, taken)
        lines = rng.choice([(number,), (word, number)])
        taken += lines
        previous = 1 + list(COLORS).index(shown[-1].color) if shown else 0
        for canvas, many in ((background, gap), (_with_sign(rng, background, lines, color, jitter), duration)):
            pixels += [canvas.bytes()] * many
            labels += [canvas.labels] * many
            before += [previous] * many
        shown.append(Sign(color, lines))
    return Shown(
        _questions(shown),
        frames=np.stack(pixels),
        frame_labels=np.stack(labels),
        before=np.array(before),
    )


def _durations(rng: Random, total: int, count: int) -> tuple[list[int], list[int]]:
    """Draw how many frames each sign is shown, and how many empty ones precede it; they sum to `total`."""
    shows, gaps = [SHORTEST_SHOW] * count, [0] * count
    for _ in range(total - SHORTEST_SHOW * count):
        rng.choice((shows, shows, gaps))[rng.randrange(count)] += 1
    return shows, gaps


def _with_sign(rng: Random, background: Canvas, lines: tuple[str, ...], color: str, jitter: int) -> Canvas:
    canvas = background.copy()
    width, height = max(map(len, lines)), len(lines)
    column, row = rng.randint(1, FRAME_GRID - 1 - width), rng.randint(1, FRAME_GRID - 1 - height)
    place = (PATCH * column + rng.randint(-jitter, jitter), PATCH * row + rng.randint(-jitter, jitter))
    canvas.write(place, lines, color)
    return canvas


def _questions(signs: list[Sign]) -> list[Question]:
    questions = []
    for sign in signs:
        questions.append(Question("v2n", f"what number was on the {sign.color} sign?", sign.number))
        if sign.word:
            questions.append(Question("v2w", f"what word was on the {sign.color} sign?", sign.word))
    for first, second in pairwise(signs):
        follows, precedes = f"what number followed {first.number}?", f"what number came before {second.number}?"
        questions.append(Question("next", follows, second.number, via=first.color, holder=second.color))
        questions.append(Question("previous", precedes, first.number, via=first.color, holder=first.color))
    return questions
