"""What a generated question is, and what its pictures and pages look like."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Look:
    """
    Attributes:
        picture_size, page_size: width and height in pixels.
        font_px: height of the text on cards and pages, in pixels.
        words: fewest of the text before each picture.
        distractors: most needles of the same form with other names.
    """

    picture_size: tuple[int, int] = (448, 448)
    page_size: tuple[int, int] = (896, 1152)
    font_px: int = 20
    words: int = 60
    distractors: int = 2


@dataclass(frozen=True)
class Question:
    """
    Attributes:
        answer_format: `Str`, `Int`, `List` (of numbers) or `None` (nothing answers it): how it is scored.
        length: number of pictures or pages.
        depth: where the needle lies, from 0 (first) to 1 (last); None where it lies in no one place.
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
    """
    Attributes:
        images: WebP files.
        written: the lines of text on each image.
        texts: what stands before each image; empty where there are only images.
    """

    question: Question
    images: list[bytes]
    written: list[tuple[str, ...]]
    texts: list[str] = field(default_factory=list)


def place_of(depth: float, length: int) -> int:
    """The index at a depth: 0 is the first, 1 the last."""
    return int(depth * (length - 1) + 0.5)
