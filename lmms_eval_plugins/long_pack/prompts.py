"""The parts of a generated prompt, and how its pictures and pages look."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Look:
    """How pictures, pages and text look.

    Attributes:
        picture_size, page_size: width and height in pixels.
        font_px: height of the text on cards and pages, in pixels.
        words: the minimum number of words before each picture.
        distractors: the maximum number of other needles of the same form, with other names.
    """

    picture_size: tuple[int, int] = (448, 448)
    page_size: tuple[int, int] = (896, 1152)
    font_px: int = 20
    words: int = 60
    distractors: int = 2


@dataclass(frozen=True)
class Question:
    """A question and its answer.

    Attributes:
        answer_format: how it is scored: `Str`, `Int`, `List` (of numbers) or `None` (unanswerable).
        length: number of pictures or pages.
        depth: where the needle lies, from 0 (first) to 1 (last); None if it has no single place.
        places: the pictures or pages that answer it, counted from 1, ascending.
    """

    kind: str
    text: str
    answer: str
    answer_format: str
    length: int
    depth: float | None
    places: tuple[int, ...]


@dataclass(frozen=True)
class Prompt:
    """A question with its images and text.

    Attributes:
        images: WebP files.
        written: the lines of text on each image.
        texts: the text before each image; empty if there are only images.
    """

    question: Question
    images: list[bytes]
    written: list[tuple[str, ...]]
    texts: list[str] = field(default_factory=list)


def place_of(depth: float, length: int) -> int:
    """Return the index at a depth: 0 is the first, 1 the last."""
    return int(depth * (length - 1) + 0.5)
