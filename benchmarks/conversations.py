"""Texts of some 1,000 tokens, each with five questions asked one after the other, in the shape of SCBench
(2412.10319): needles in prose, and key-value records. Drawn from a seed."""

from dataclasses import dataclass
from random import Random

from .retrieval import EVERYBODY, PLACES, scattered

TURNS = 5
NEEDLES = 8  # sentences in prose that each say the code of one place
RECORDS = 42  # key-value sentences: a name, a number
NEEDLE = "The door code of the {} is"
RECORD = "The locker number of {} is"
QUESTION = "\n\nAccording to the text: "


@dataclass(frozen=True)
class Turn:
    """The beginning of one of the text's sentences as the question, and the rest of that sentence as the answer.

    `kind`: "needle" or "record"."""

    kind: str
    question: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    context: str
    turns: tuple[Turn, ...]


def draw_conversations(count: int, seed: str = "turns") -> list[Conversation]:
    """Draw conversations that ask about needles and records in turn, every second one about a record first; a larger
    `count` only adds to them."""
    return [_draw(Random(f"{seed}/{number}"), number % 2) for number in range(count)]


def _draw(rng: Random, first: int) -> Conversation:
    names = rng.sample(EVERYBODY, RECORDS)
    numbers = rng.sample(range(100, 1000), NEEDLES + RECORDS)  # unique: an answer says which sentence was read
    beginnings = [NEEDLE.format(place) for place in rng.sample(PLACES, NEEDLES)] + [RECORD.format(key) for key in names]
    facts = [(beginning, f" {number}") for beginning, number in zip(beginnings, numbers, strict=True)]
    context = scattered(rng, [f"{beginning}{answer}." for beginning, answer in facts])
    asked = {"needle": iter(rng.sample(facts[:NEEDLES], NEEDLES)), "record": iter(rng.sample(facts[NEEDLES:], RECORDS))}
    kinds = [list(asked)[(first + place) % 2] for place in range(TURNS)]
    of_turns = ((kind, *next(asked[kind])) for kind in kinds)
    turns = tuple(Turn(kind, QUESTION + beginning, answer) for kind, beginning, answer in of_turns)
    return Conversation(context, turns)
