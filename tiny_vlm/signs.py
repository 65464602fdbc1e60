"""Render scenes of coloured signs and pose questions about them: all that the bundled model knows.

A scene is a 156 x 156 image with four to six signs at random positions, each with a word, a number, or a word above a
number, among plain text, boxes, a gradient and noise. Everything is drawn from the caller's `random.Random`: same seed,
same pixels.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lmms_eval_plugins.tiny_vlm.questions import Question

PATCH = 12  # pixels; also the pitch of the text, so that each character's centre has its own patch
GRID = 13  # patches per side
SIDE = PATCH * GRID  # pixels
FRAME_GRID = 7  # patches per side of a video frame after LLaVA-OneVision's pooling of GRID * GRID

DIGITS = string.digits
LETTERS = "".join(c for c in string.ascii_lowercase if c not in "io")  # i and o look like 1 and 0 in capitals
CHARACTERS = DIGITS + LETTERS
COLORS = {  # light enough for dark letters
    "red": (235, 75, 75),
    "green": (60, 175, 75),
    "blue": (85, 130, 250),
    "yellow": (240, 225, 60),
    "orange": (245, 150, 40),
    "purple": (185, 95, 225),
    "cyan": (60, 215, 225),
    "white": (248, 248, 248),
}
# The words of the prompts. They are one token each and never occur on a sign.
PROMPT_WORDS = (
    *("what", "number", "word", "color", "is", "on", "the", "below", "above", "sign", "that", "says"),
    *("answer", "question", "using", "a", "single", "or", "phrase", "user", "assistant"),
    *COLORS,
)

HEADLINE_KINDS = ("c2n", "c2w", "w2n", "n2w")  # answers of two to four characters, one token each
COLOR_KIND = "t2c"  # the answer is a colour: one token

MARGIN = 2  # pixels of background around a sign's text
MOST_NOISE = 6.0  # standard deviation, out of 255
FONT_SIZES = (12, 13)
STROKE = 3  # eighths of a pixel, on either side
LABELS = ("glyph", "color", "index", "last", "left", "above")


@dataclass(frozen=True)
class Sign:
    color: str
    lines: tuple[str, ...]

    @property
    def word(self) -> str | None:
        return next((line for line in self.lines if line[0] in LETTERS), None)

    @property
    def number(self) -> str | None:
        return next((line for line in self.lines if line[0] in DIGITS), None)


@dataclass
class Scene:
    """A rendered scene.

    Attributes:
        pixels: (SIDE, SIDE, 3) uint8.
        labels: (len(LABELS), GRID, GRID) int64, for the patch under each character's centre: 1 + index in CHARACTERS,
            1 + index in COLORS, 1-based index in the line, whether it ends the line, the character to its left and the
            one above it on the same sign; 0 is "none".
    """

    pixels: np.ndarray
    signs: list[Sign]
    labels: np.ndarray


def questions(signs: list[Sign]) -> list[Question]:
    """Return all questions that these signs answer, each with exactly one answer."""
    found = []
    for sign in signs:
        if sign.number:
            found.append(Question("c2n", f"what number is on the {sign.color} sign?", sign.number))
        if sign.word:
            found.append(Question("c2w", f"what word is on the {sign.color} sign?", sign.word))
        if sign.word and sign.number:
            found.append(Question("w2n", f"what number is below {sign.word}?", sign.number, sign=sign.color))
            found.append(Question("n2w", f"what word is above {sign.number}?", sign.word, sign=sign.color))
        found.append(Question("t2c", f"what color is the sign that says {sign.lines[-1]}?", sign.color))
    return found


def draw_scene(
    rng: Random,
    counts: tuple[int, int] = (4, 6),
    taken: list[str] | None = None,
    avoided: Collection[str] = PROMPT_WORDS,
    noise: float = MOST_NOISE,
) -> Scene:
    """Draw a scene to ask about: colours and texts are unique, and no text is a prefix of another.

    `counts`: fewest and most signs. `taken`: texts of other scenes, to which this scene's are added. `avoided`: words
    that never occur on a sign. `noise`: its largest standard deviation, out of 255.
    """
    canvas = Canvas(rng)
    canvas.gradient()
    canvas.boxes(rng.randint(0, 5))
    taken = [] if taken is None else taken
    signs = []
    for color in rng.sample(list(COLORS), rng.randint(*counts)):
        word, number = new_text(rng, LETTERS, taken, avoided), new_text(rng, DIGITS, taken)
        lines = rng.choice([(word,), (number,), (word, number), (word, number)])
        place = canvas.free_place(lines)
        if place is None:
            continue
        canvas.write(place, lines, color)
        taken += lines
        signs.append(Sign(color, lines))
    for _ in range(rng.randint(0, 2)):  # text without a sign
        text = new_text(rng, CHARACTERS, taken, avoided, shortest=1)
        place = canvas.free_place((text,))
        if place is not None:
            canvas.write(place, (text,), None)
            taken.append(text)
    canvas.noise(noise)
    return Scene(canvas.bytes(), signs, canvas.labels)


def draw_packed_scene(rng: Random, jitter: int = PATCH // 2, grid: int = GRID) -> Scene:
    """Draw as many signs as fit, with repeated colours and no questions: dense supervision for the vision tower.

    Text lies up to `jitter` pixels off the patch grid: 0 is the easiest to read, PATCH // 2 means anywhere.
    """
    canvas = Canvas(rng, grid)
    canvas.gradient()
    down = rng.randint(-jitter, jitter)
    row = 1
    while row < grid - 1:
        height = 2 if rng.random() < 0.4 and row < grid - 2 else 1
        right = rng.randint(-jitter, jitter)
        column = rng.randint(1, 2)
        while True:
            width = rng.randint(1, 4)
            if column + width >= grid:
                break
            lengths = [width] + [rng.randint(1, width) for _ in range(height - 1)]
            lines = tuple("".join(rng.choices(CHARACTERS, k=length)) for length in lengths)
            color = rng.choice([None, *COLORS])
            canvas.write((column * PATCH + right, row * PATCH + down), lines, color)
            column += width + 1
        row += height + 1
    canvas.noise()
    return Scene(canvas.bytes(), [], canvas.labels)


def new_text(
    rng: Random,
    alphabet: str,
    taken: Sequence[str],
    avoided: Collection[str] = PROMPT_WORDS,
    shortest: int = 2,
    longest: int = 4,
) -> str:
    """Draw a text that is not in `avoided` and is neither a prefix nor an extension of any text in `taken`."""
    while True:
        text = "".join(rng.choices(alphabet, k=rng.randint(shortest, longest)))
        clashes = any(text.startswith(other) or other.startswith(text) for other in taken)
        if not clashes and text not in avoided:
            return text


class Canvas:
    """A picture being drawn, in float pixels, with the patch labels of the text so far.

    `grid`: characters that fit side by side; the canvas has PATCH * grid pixels per side.
    """

    def __init__(self, rng: Random, grid: int = GRID) -> None:
        self.rng, self.grid, self.side = rng, grid, PATCH * grid
        level = rng.randint(120, 190)
        self.pixels = np.empty((self.side, self.side, 3), np.float32)
        self.pixels[:] = [level + rng.randint(-15, 15) for _ in range(3)]
        self.labels = np.zeros((len(LABELS), grid, grid), np.int64)
        self.occupied: list[tuple[int, int, int, int]] = []

    def gradient(self) -> None:
        ramp = np.linspace(-1, 1, self.side, dtype=np.float32)
        self.pixels += ramp[None, :, None] * self.rng.uniform(-25, 25)
        self.pixels += ramp[:, None, None] * self.rng.uniform(-25, 25)

    def boxes(self, count: int) -> None:
        for _ in range(count):
            x, y = self.rng.randint(0, self.side - 10), self.rng.randint(0, self.side - 10)
            width, height = self.rng.randint(5, 70), self.rng.randint(3, 40)
            self.pixels[y : y + height, x : x + width] += self.rng.uniform(-22, 22)

    def copy(self) -> Canvas:
        """Return an independent copy."""
        other = copy(self)
        other.pixels, other.labels, other.occupied = self.pixels.copy(), self.labels.copy(), list(self.occupied)
        return other

    def noise(self, most: float = MOST_NOISE) -> None:
        x, y = self.rng.randint(0, SIDE), self.rng.randint(0, SIDE)
        self.pixels += _noise()[y : y + self.side, x : x + self.side] * np.float32(self.rng.uniform(0, most))

    def bytes(self) -> np.ndarray:
        return np.clip(self.pixels, 0, 255).astype(np.uint8)

    def free_place(self, lines: tuple[str, ...], apart: Sequence[int] = ()) -> tuple[int, int] | None:
        """Find a random free place for a new sign and return the top left corner of its text; None if none is found.

        `apart`: left edges from which that of the new sign must be at least a patch away.
        """
        width, height = PATCH * max(map(len, lines)), PATCH * len(lines)
        for _ in range(60):
            x = self.rng.randint(MARGIN, self.side - MARGIN - width)
            y = self.rng.randint(MARGIN, self.side - MARGIN - height)
            box = (x - MARGIN, y - MARGIN, x + width + MARGIN, y + height + MARGIN)
            near = any(abs(x - left) < PATCH for left in apart)
            if not near and not any(_overlap(box, other) for other in self.occupied):
                self.occupied.append(box)
                return x, y
        return None

    def write(self, place: tuple[int, int], lines: tuple[str, ...], color: str | None) -> None:
        """Draw the sign (plain text if `color` is None) and label the patches of its characters."""
        x, y = place
        width, height = PATCH * max(map(len, lines)), PATCH * len(lines)
        if color is None:
            ink = np.float32(self.rng.randint(30, 60))
        else:
            paint = np.clip([value + self.rng.randint(-14, 14) for value in COLORS[color]], 0, 255)
            self.pixels[y - MARGIN : y + height + MARGIN, x - MARGIN : x + width + MARGIN] = paint
            ink = np.float32(self.rng.randint(0, 20))
        size = self.rng.choice(FONT_SIZES)
        row, column = (y + PATCH // 2) // PATCH, (x + PATCH // 2) // PATCH
        for j, line in enumerate(lines):
            for i, character in enumerate(line):
                top, left = y + j * PATCH, x + i * PATCH
                cell = self.pixels[top : top + PATCH, left : left + PATCH]
                alpha = _glyph(character, size)
                cell[:] = cell * (1 - alpha) + ink * alpha
                self.labels[:, row + j, column + i] = (
                    _code(character),
                    0 if color is None else 1 + list(COLORS).index(color),
                    1 + i,
                    i == len(line) - 1,
                    _code(line[i - 1]) if i else 0,
                    _code(lines[j - 1][i]) if j and i < len(lines[j - 1]) else 0,
                )


def _code(character: str) -> int:
    return 1 + CHARACTERS.index(character)


def _overlap(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@cache
def _glyph(character: str, size: int) -> np.ndarray:
    """Return the coverage (PATCH, PATCH, 1) in [0, 1] of a capital letter or digit in Pillow's own font."""
    fine = 8 * PATCH  # drawn large and bold, then reduced, so that thin strokes survive
    image = Image.new("L", (fine, fine), 0)
    font = ImageFont.load_default(size=8 * size)
    ImageDraw.Draw(image).text(
        (fine / 2, fine / 2), character.upper(), font=font, fill=255, anchor="mm", stroke_width=STROKE
    )
    return np.asarray(image.reduce(8), dtype=np.float32)[..., None] / 255


@cache
def _noise() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2 * SIDE, 2 * SIDE, 3), dtype=np.float32)
