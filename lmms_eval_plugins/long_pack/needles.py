"""Hide needles in a text with many pictures, at a given depth.

As in MM-NIAH (arXiv 2406.07230), a needle is a sentence of the text or something pasted into a picture; the question is
to retrieve it, to count it, or to find it by way of another. As in MileBench (arXiv 2404.18532), the answer to retrieve
is an arbitrary number. Distractors surround the needle: sentences and cards of the same form with other names.
"""

from dataclasses import replace
from random import Random

from lmms_eval_plugins.long_pack.drawing import COMBINATIONS, Canvas, card_size, picture, with_card
from lmms_eval_plugins.long_pack.prompts import Look, Prompt, Question, place_of
from lmms_eval_plugins.long_pack.words import FIRST_NAMES, NAMES, SITES, Name, pairs, sentences

KINDS = ("retrieval_text", "retrieval_image", "which_image", "counting", "reasoning")
CODES = range(1_000_000, 10_000_000)  # seven digits: at least two tokens with any tokenizer
MOST_COUNTED = 6
SHAPES = (3, 5)  # fewest and most per picture
BREAK = "\n\n"  # between paragraphs, and after a picture
CARDS = "A small white card is pasted into some of the pictures"
LONGEST_CARD = [max(NAMES, key=len).upper(), "0000000"]


def smallest_picture(font_px: int) -> tuple[int, int]:
    """Return the width and height that fit every card, with room to place it."""
    width, height = card_size(LONGEST_CARD, font_px)
    return width + font_px, height + font_px


class Haystack:
    """A text with pictures, before a needle is hidden in it.

    Attributes:
        paragraphs: the sentences before each picture.
        shapes: the (colour, shape) pairs in each picture.
        pictures: the pictures without cards.
        place: index of the paragraph and picture at the depth.
        target: (colour, shape) that only the picture at `place` shows.
    """

    def __init__(self, seed: str, length: int, depth: float, look: Look):
        rng = Random(seed)
        self.seed, self.length, self.depth, self.look = seed, length, depth, look
        self.place = place_of(depth, length)
        self.target = rng.choice(COMBINATIONS)
        others = [combination for combination in COMBINATIONS if combination != self.target]
        self.paragraphs = [sentences(rng, look.words) for _ in range(length)]
        self.shapes = [rng.sample(others, rng.randint(*SHAPES)) for _ in range(length)]
        self.shapes[self.place][0] = self.target
        self.pictures = [picture(rng, look.picture_size, shapes) for shapes in self.shapes]
        self._files: dict[int, bytes] = {}

    def prompt(self, kind: str) -> Prompt:
        """Hide a needle of this kind, and return the prompt with its question."""
        rng = Random(f"{self.seed}/{kind}")
        return {
            "retrieval_text": self._retrieval_text,
            "retrieval_image": self._retrieval_image,
            "which_image": self._which_image,
            "counting": self._counting,
            "reasoning": self._reasoning,
        }[kind](rng)

    def _retrieval_text(self, rng: Random) -> Prompt:
        sites = pairs(rng, NAMES, SITES, 1 + self.look.distractors)
        codes = rng.sample(CODES, len(sites))
        said = [f"The access code of the {_both(site)} is {code}." for site, code in zip(sites, codes, strict=True)]
        text = f"What is the access code of the {_both(sites[0])}?"
        question = self._question("retrieval_text", text, codes[0], [self.place])
        return self._prompt(question, self._said(rng, said), {})

    def _retrieval_image(self, rng: Random) -> Prompt:
        places = [self.place, *self._elsewhere(rng, [self.place], self.look.distractors)]
        names, codes = rng.sample(NAMES, len(places)), rng.sample(CODES, len(places))
        text = f"{CARDS}. Which number is on the card that says {names[0].upper()}?"
        question = self._question("retrieval_image", text, codes[0], [self.place])
        return self._prompt(question, {}, self._numbered(rng, places, names, codes))

    def _which_image(self, rng: Random) -> Prompt:
        color, shape = self.target
        text = f"Which picture shows a {color} {shape}? Answer with the number of the picture in square brackets."
        return self._prompt(self._question("which_image", text, self.place + 1, [self.place], "List"), {}, {})

    def _counting(self, rng: Random) -> Prompt:
        counted = self._elsewhere(rng, [], rng.randint(1, min(MOST_COUNTED, self.length)))
        others = self._elsewhere(rng, counted, self.look.distractors)
        name, *names = rng.sample(NAMES, 1 + len(others))
        text = (
            f"{CARDS}. In how many of the pictures does the card say {name.upper()}? "
            "Answer with the number in square brackets."
        )
        question = replace(self._question("counting", text, len(counted), counted, "List"), depth=None)
        lines = {place: [name.upper()] for place in counted}
        lines |= {place: [other.upper()] for place, other in zip(others, names, strict=True)}
        return self._prompt(question, {}, self._cards(rng, lines))

    def _reasoning(self, rng: Random) -> Prompt:
        (card,) = self._elsewhere(rng, [self.place], 1)
        places = [card, *self._elsewhere(rng, [card], self.look.distractors)]
        people, codes = rng.sample(FIRST_NAMES, len(places)), rng.sample(CODES, len(places))
        sites = pairs(rng, NAMES, SITES, len(places))
        said = [f"The {_both(site)} is looked after by {who}." for site, who in zip(sites, people, strict=True)]
        text = (
            f"{CARDS}, with a person's name and number. "
            f"Which number has the person who looks after the {_both(sites[0])}?"
        )
        question = self._question("reasoning", text, codes[0], [self.place, card])
        return self._prompt(question, self._said(rng, said), self._numbered(rng, places, people, codes))

    def _question(self, kind: str, text: str, answer: int, places: list[int], answer_format: str = "Str") -> Question:
        counted_from_1 = tuple(sorted(place + 1 for place in places))
        return Question(kind, text, str(answer), answer_format, self.length, self.depth, counted_from_1)

    def _elsewhere(self, rng: Random, taken: list[int], count: int) -> list[int]:
        """Draw up to `count` places that are not taken."""
        free = [place for place in range(self.length) if place not in taken]
        return rng.sample(free, min(count, len(free)))

    def _said(self, rng: Random, said: list[str]) -> dict[int, list[str]]:
        """Return the paragraphs that change: the first sentence goes to the depth, the others anywhere."""
        changed: dict[int, list[str]] = {}
        for number, each in enumerate(said):
            place = self.place if number == 0 else rng.randrange(self.length)
            paragraph = changed.setdefault(place, list(self.paragraphs[place]))
            paragraph.insert(rng.randint(0, len(paragraph)), each)
        return changed

    def _numbered(self, rng: Random, places: list[int], names: list[str], codes: list[int]) -> dict[int, Canvas]:
        """Return the pictures that get a card with a name and a number."""
        cards = zip(places, names, codes, strict=True)
        return self._cards(rng, {place: [name.upper(), str(code)] for place, name, code in cards})

    def _cards(self, rng: Random, cards: dict[int, list[str]]) -> dict[int, Canvas]:
        """Return the pictures that get a card with these lines."""
        return {place: with_card(rng, self.pictures[place], lines, self.look.font_px) for place, lines in cards.items()}

    def _prompt(self, question: Question, paragraphs: dict[int, list[str]], pictures: dict[int, Canvas]) -> Prompt:
        """Build the prompt from the haystack with some paragraphs and pictures replaced."""
        texts = [
            f"{BREAK if place else ''}{' '.join(paragraphs.get(place, paragraph))}{BREAK}Picture {place + 1}:\n"
            for place, paragraph in enumerate(self.paragraphs)
        ]
        images = [pictures[place].webp() if place in pictures else self._file(place) for place in range(self.length)]
        written = [tuple(pictures[place].texts) if place in pictures else () for place in range(self.length)]
        return Prompt(question, images, written, texts)

    def _file(self, place: int) -> bytes:
        """Return the file of a picture without a card, encoded once for all kinds of prompts."""
        if place not in self._files:
            self._files[place] = self.pictures[place].webp()
        return self._files[place]


def _both(site: Name) -> str:
    return " ".join(site)
