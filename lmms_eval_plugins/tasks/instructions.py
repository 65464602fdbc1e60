"""Prompts with several instructions that a program can check, in the manner of IFEval (2311.07911), and their scores.

    python -m lmms_eval_plugins.tasks.instructions

draws the questions of the task `several_instructions` from a seed and writes its parquet file.
"""

import argparse
import json
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

QUESTIONS = 200
COUNTS = (2, 3, 4, 5)  # instructions per prompt, in turn
FILE = Path(__file__).parent / "several_instructions" / "questions.parquet"
TOPICS = (
    "a day at the beach", "the moon", "how bread is baked", "a small library", "learning to swim", "the first snow",
    "a train journey", "keeping a cat", "an old bridge", "the life of bees", "a street market", "growing tomatoes",
    "a lost umbrella", "the history of paper", "riding a bicycle", "a lighthouse", "making tea", "a walk in the rain",
    "the school garden", "a village festival", "how clocks work", "a night in the mountains", "the colour blue",
    "a letter from a friend", "repairing a chair", "the river in spring", "a chess game", "a new neighbour",
)  # fmt: skip
KEYWORDS = ("window", "copper", "morning", "silver", "honest", "seven", "music", "garden", "simple", "winter", "letter")
COMMON = ("the", "and", "is", "very", "with", "of")  # words that are hard to do without
ENDINGS = ("goodbye", "finally", "today", "together", "forever")
OPENINGS = ("Indeed", "Yesterday", "Listen", "Perhaps", "Once")


@dataclass(frozen=True)
class Instruction:
    """An instruction, its check, and what may stand for `{}` in its text.

    Attributes:
        follows: whether an answer follows it, given the value; the answer has no blanks around it and is not empty.
        excludes: names of instructions that cannot be followed together with it.
        is_ban: whether it only rules something out, which a broken answer follows too.
    """

    text: str
    follows: Callable[[str, str], bool]
    values: tuple[str, ...] = ("",)
    excludes: tuple[str, ...] = ()
    is_ban: bool = False


def _words(answer: str) -> list[str]:
    return [word for part in answer.split() if (word := part.strip(string.punctuation + "\u201c\u201d\u2019").lower())]


def _is_object(answer: str) -> bool:
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", answer, re.DOTALL)
    try:
        return isinstance(json.loads(fenced[1] if fenced else answer), dict)
    except (ValueError, RecursionError):
        return False


def _sentences(answer: str) -> int:
    """Count runs of text that end with a full stop, an exclamation or a question mark, and what is left without one."""
    return sum(any(map(str.isalnum, part)) for part in re.split(r"[.!?]+(?=\s|[\"\u201d')]|$)", answer))


def _bullets(answer: str) -> int:
    return sum(bool(re.match(r"\s*[*-]\s+\S", line)) for line in answer.splitlines())


INSTRUCTIONS = {
    "capitals": Instruction("Write the whole answer in capital letters.", lambda answer, _: answer.isupper()),
    "lowercase": Instruction(
        "Write the whole answer in lowercase letters, without any capital letter.",
        lambda answer, _: answer.islower(),
        excludes=("capitals",),
    ),
    "begin": Instruction(
        'Begin the answer with the word "{}".',
        lambda answer, word: _words(answer)[:1] == [word.lower()],
        OPENINGS,
    ),
    "end": Instruction(
        'End the answer with the word "{}".', lambda answer, word: _words(answer)[-1:] == [word.lower()], ENDINGS
    ),
    "keyword": Instruction(
        'Use the word "{}" in the answer.', lambda answer, word: word.lower() in _words(answer), KEYWORDS
    ),
    "forbidden": Instruction(
        'Do not use the word "{}" in the answer.',
        lambda answer, word: word.lower() not in _words(answer),
        COMMON,
        is_ban=True,
    ),
    "sentences": Instruction(
        "Write exactly {} sentences.", lambda answer, count: _sentences(answer) == int(count), ("2", "3", "4")
    ),
    "bullets": Instruction(
        "Write the answer as exactly {} bullet points, each on a line of its own that begins with *.",
        lambda answer, count: _bullets(answer) == int(count),
        ("2", "3", "4"),
        excludes=("begin", "sentences"),
    ),
    "few_words": Instruction(
        "Use fewer than {} words.",
        lambda answer, count: len(answer.split()) < int(count),
        ("40", "60", "80"),
        is_ban=True,
    ),
    "no_commas": Instruction("Do not use any commas.", lambda answer, _: "," not in answer, is_ban=True),
    "title": Instruction(
        "Give the answer a title in double angular brackets, such as <<the title>>.",
        lambda answer, _: re.search(r"<<[^<>\n]+>>", answer) is not None,
        excludes=("begin",),
    ),
    "postscript": Instruction(
        "At the end, add a postscript that begins with P.S.",
        lambda answer, _: re.search(r"(?:^|\s)P\.\s?S\.", answer, re.IGNORECASE) is not None,
        excludes=("end", "sentences", "bullets", "lowercase"),
    ),
    "json": Instruction(
        "The whole answer must be one JSON object, with nothing before or after it.",
        lambda answer, _: _is_object(answer),
        excludes=("begin", "end", "sentences", "bullets", "no_commas", "title", "postscript"),
    ),
}


def fit(names: tuple[str, ...]) -> bool:
    """Return whether one answer can follow all these instructions."""
    return not any(
        one in INSTRUCTIONS[other].excludes or other in INSTRUCTIONS[one].excludes
        for one, other in combinations(names, 2)
    )


def draw_questions(count: int, seed: str = "instructions") -> list[dict[str, Any]]:
    """Draw the task's rows; a larger `count` only adds to them. Instructions of one prompt fit together."""
    rows = []
    for number in range(count):
        rng = Random(f"{seed}/{number}")
        names = None
        while names is None or not fit(names):
            names = tuple(rng.sample(list(INSTRUCTIONS), COUNTS[number % len(COUNTS)]))
        values = [rng.choice(INSTRUCTIONS[name].values) for name in names]
        asked = [f"- {INSTRUCTIONS[name].text.format(value)}" for name, value in zip(names, values, strict=True)]
        head = f"Write a short text about {rng.choice(TOPICS)}. Follow all of these instructions:"
        rows.append(
            {"idx": f"{number:04d}", "prompt": "\n".join([head, *asked]), "instructions": names, "values": values}
        )
    return rows


def followed(doc: dict[str, Any], answer: str) -> list[bool]:
    """Return which of a row's instructions an answer follows; an empty one follows none."""
    answer = answer.strip()
    pairs = zip(doc["instructions"], doc["values"], strict=True)
    return [bool(answer) and INSTRUCTIONS[name].follows(answer, value) for name, value in pairs]


def doc_to_visual(doc: dict[str, Any]) -> list:
    """Return no picture: the task is text."""
    return []


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score an answer: the share of the instructions that it follows, and whether it follows all; and, if the prompt
    has others than bans, the share of those."""
    each = followed(doc, results[0])
    demands = [right for name, right in zip(doc["instructions"], each, strict=True) if not INSTRUCTIONS[name].is_ban]
    scores = {"instructions_followed": sum(each) / len(each), "all_followed": float(all(each))}
    return scores | ({"demands_followed": sum(demands) / len(demands)} if demands else {})


def main() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    pq.write_table(pa.Table.from_pylist(draw_questions(QUESTIONS)), FILE, compression="zstd")
    print(f"{FILE}: {QUESTIONS} questions")


if __name__ == "__main__":
    main()
