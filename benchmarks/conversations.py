"""Texts of some 1,000 tokens, each with five questions asked one after the other, in the shape of SCBench
(2412.10319): needles in prose, and key-value records. Drawn from a seed."""

from dataclasses import dataclass
from random import Random

from .retrieval import FILLERS, FIRST_NAMES, LAST_NAMES, OPENING, PLACES

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


def draw_conversations(
    count: int, needles: int = NEEDLES, records: int = RECORDS, turns: int = TURNS, seed: str = "turns"
) -> list[Conversation]:
    """Draw conversations that ask about needles and records in turn, every second one about a record first; a larger
    `count` only adds to them. `needles` and `records`: of a text; `turns`: at most twice the smaller of them."""
    return [_draw(Random(f"{seed}/{number}"), number % 2, needles, records, turns) for number in range(count)]


def _draw(rng: Random, first: int, needles: int, records: int, turns: int) -> Conversation:
    names = rng.sample([f"{name} {family}" for name in FIRST_NAMES for family in LAST_NAMES], records)
    numbers = rng.sample(range(100, 1000), needles + records)  # unique: an answer says which sentence was read
    beginnings = [NEEDLE.format(place) for place in rng.sample(PLACES, needles)] + [RECORD.format(key) for key in names]
    facts = [(beginning, f" {number}") for beginning, number in zip(beginnings, numbers, strict=True)]
    fillers = rng.sample(FILLERS, len(FILLERS))
    sentences = [f"{beginning}{answer}." for beginning, answer in facts] + fillers[OPENING:]
    rng.shuffle(sentences)
    asked = {"needle": iter(rng.sample(facts[:needles], needles)), "record": iter(rng.sample(facts[needles:], records))}
    kinds = [list(asked)[(first + place) % 2] for place in range(turns)]
    of_turns = ((kind, *next(asked[kind])) for kind in kinds)
    return Conversation(
        " ".join(fillers[:OPENING] + sentences),
        tuple(Turn(kind, QUESTION + beginning, answer) for kind, beginning, answer in of_turns),
    )
