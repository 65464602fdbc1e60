"""Draw the pictures of the haystack and the cards pasted into them, with text in Pillow's own scalable font."""

import io
import math
from collections.abc import Sequence
from functools import cache
from random import Random

from PIL import Image, ImageDraw, ImageFont, features

from lmms_eval_plugins.cells.errors import EvaluationFailed

Size = tuple[int, int]  # width and height in pixels

COLORS = {
    "red": (200, 30, 30),
    "blue": (30, 70, 200),
    "green": (20, 130, 50),
    "yellow": (250, 215, 20),
    "purple": (125, 40, 155),
    "orange": (240, 130, 20),
    "black": (20, 20, 20),
    "white": (255, 255, 255),
}
SIDES = {"triangle": 3, "diamond": 4, "hexagon": 6}  # regular polygons with a corner on top
SHAPES = ("circle", "square", "star", "cross", *SIDES)
COMBINATIONS = [(color, shape) for color in COLORS for shape in SHAPES]
CELLS = 3  # a picture has CELLS x CELLS positions for shapes
LINE = 1.3  # line spacing, in font heights
INK, PAPER, RULE = (25, 25, 25), (255, 255, 255), (120, 120, 120)


@cache
def font(px: int) -> ImageFont.FreeTypeFont:
    """Load Pillow's own font. Raises EvaluationFailed if this Pillow was built without FreeType."""
    if not features.check("freetype2"):
        raise EvaluationFailed("this Pillow has no scalable font: it was built without FreeType")
    return ImageFont.load_default(px)


@cache
def width_of(text: str, px: int) -> int:
    """Return the width of a text in pixels; cached, since words repeat."""
    return math.ceil(font(px).getlength(text))


def wrapped(text: str, px: int, width: int) -> list[str]:
    """Break a paragraph into lines of at most `width` pixels."""
    lines: list[list[str]] = []
    used = width + 1
    for word in text.split():
        longer = used + width_of(" ", px) + width_of(word, px)
        if longer > width:
            lines.append([])
            longer = width_of(word, px)
        lines[-1].append(word)
        used = longer
    return [" ".join(line) for line in lines]


class TooSmall(ValueError):
    """Raised if something does not fit into its place."""


class Canvas:
    """A picture being drawn.

    Attributes:
        texts: the lines written so far, in order.
    """

    def __init__(self, image: Image.Image, texts: Sequence[str] = ()):
        self.image, self.texts = image, list(texts)
        self.draw = ImageDraw.Draw(image)

    def write(self, place: tuple[int, int], text: str, px: int, fill: tuple[int, int, int] = INK) -> int:
        """Write one line with its upper left corner at `place` and return its width. Raises TooSmall if it would be cut
        off."""
        left, top, right, bottom = self.draw.textbbox(place, text, font(px))
        if left < 0 or top < 0 or right > self.image.width or bottom > self.image.height:
            raise TooSmall(f"{text!r} at {place} does not fit into {self.image.size}")
        self.draw.text(place, text, fill, font(px))
        self.texts.append(text)
        return math.ceil(right - left)

    def webp(self) -> bytes:
        """Encode the picture without loss; the file is a fourth of the size of a PNG."""
        file = io.BytesIO()
        self.image.save(file, "WEBP", lossless=True)
        return file.getvalue()


def picture(rng: Random, size: Size, shapes: Sequence[tuple[str, str]]) -> Canvas:
    """Draw each (colour, shape) at its own position on a pale gradient."""
    width, height = size
    top, bottom = (tuple(rng.randint(150, 225) for _ in range(3)) for _ in range(2))
    column = Image.new("RGB", (1, height))
    shades = [tuple(round(a + (b - a) * y / height) for a, b in zip(top, bottom, strict=True)) for y in range(height)]
    column.putdata(shades)
    canvas = Canvas(column.resize(size))
    cell_width, cell_height = width / CELLS, height / CELLS
    for cell, (color, shape) in zip(rng.sample(range(CELLS**2), len(shapes)), shapes, strict=True):
        radius = min(cell_width, cell_height) * rng.uniform(0.3, 0.42)
        x, y = ((cell % CELLS) + 0.5) * cell_width, ((cell // CELLS) + 0.5) * cell_height
        draw_shape(canvas.draw, shape, COLORS[color], x, y, radius)
    return canvas


def draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, color: tuple[int, int, int], x: float, y: float, radius: float
) -> None:
    """Draw a shape around (x, y), with a thin dark outline that stands out from every background."""
    style = {"fill": color, "outline": INK, "width": max(1, round(radius / 16))}
    if shape == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), **style)
    elif shape == "square":
        side = 0.85 * radius
        draw.rectangle((x - side, y - side, x + side, y + side), **style)
    elif shape == "cross":
        arm = 0.35 * radius
        corners = [(arm, radius), (arm, arm), (radius, arm)]
        quarters = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
        points = []
        for number, (right, down) in enumerate(quarters):
            of_quarter = corners[::-1] if number % 2 == 0 else corners
            points += [(x + right * dx, y + down * dy) for dx, dy in of_quarter]
        draw.polygon(points, **style)
    elif shape == "star":
        radii = (radius, 0.42 * radius)
        draw.polygon([_around(x, y, radii[corner % 2], corner / 10) for corner in range(10)], **style)
    else:
        sides = SIDES[shape]
        draw.polygon([_around(x, y, radius, corner / sides) for corner in range(sides)], **style)


def _around(x: float, y: float, radius: float, turn: float) -> tuple[float, float]:
    """Return the point on a circle after a fraction `turn` of a clockwise turn from the top."""
    return x + radius * math.sin(2 * math.pi * turn), y - radius * math.cos(2 * math.pi * turn)


def card_size(lines: Sequence[str], px: int) -> Size:
    """Return the size of a card with these lines."""
    return max(width_of(line, px) for line in lines) + px, round(LINE * px * len(lines)) + px


def with_card(rng: Random, canvas: Canvas, lines: Sequence[str], px: int) -> Canvas:
    """Return a copy with a small white card with these lines pasted at a random position."""
    copy = Canvas(canvas.image.copy(), canvas.texts)
    width, height = card_size(lines, px)
    left, top = rng.randint(0, copy.image.width - width - 1), rng.randint(0, copy.image.height - height - 1)
    copy.draw.rectangle((left, top, left + width, top + height), fill=PAPER, outline=INK, width=max(1, px // 10))
    for number, line in enumerate(lines):
        copy.write((left + px // 2, top + px // 2 + round(LINE * px * number)), line, px)
    return copy
