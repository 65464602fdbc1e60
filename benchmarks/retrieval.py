"""Tasks for small pretrained language models, drawn from a seed.

Retrieval: complete, word for word, one of several facts about places in a town, scattered in a text; SmolLM2-135M
answers about four of five questions. Long answers: repeat a numbered list of names.
"""

from dataclasses import dataclass
from random import Random

from transformers import PreTrainedTokenizerBase

FACTS = 9  # per text
OPENING = 4  # sentences without facts at the beginning, where a text can be cut
CONTEXT_TOKENS = 420  # of SmolLM2's tokenizer, counted from the end; no text is shorter
PLACES = (
    *("north gate", "old library", "town museum", "boat house", "clock tower", "fire station", "wine shop"),
    *("green barn", "stone bridge", "post office", "train depot", "rose garden"),
)
STATEMENTS = {
    "The door code of the {} is": "code",
    "The phone number of the {} is": "code",
    "The night guard of the {} is": "person",
}
FIRST_NAMES = (
    *("Maria", "James", "Linda", "Robert", "Susan", "David", "Karen", "Thomas", "Nancy", "Daniel"),
    *("Helen", "Peter", "Laura", "Kevin", "Alice", "Oscar", "Julia", "Victor", "Emma", "Henry"),
)
LAST_NAMES = (
    *("Lopez", "Carter", "Novak", "Bennett", "Fischer", "Morgan", "Silva", "Hughes", "Tanaka", "Palmer"),
    *("Rossi", "Walker", "Jensen", "Cooper", "Weber", "Foster", "Moreau", "Turner", "Ivanov", "Brooks"),
)
EVERYBODY = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
FILLERS = (
    "The market opens early in the morning and closes after lunch.",
    "Most visitors arrive by train and walk to the river.",
    "It rained for three days, so the road to the lake was closed.",
    "The baker on the corner sells bread, cakes and strong coffee.",
    "A small shop near the coast sells maps of the islands.",
    "In the evening, the band plays in the park behind the school.",
    "Farmers bring apples and cheese from the hills every week.",
    "The bus to the airport leaves twice an hour from the main square.",
    "Children like to feed the ducks on the pond.",
    "Nobody remembers who built the wall around the town.",
    "The winters are long here, and most families keep a stack of firewood.",
    "A new road will connect the town with the valley next year.",
    "Students from the city come in summer to study the birds.",
    "The hotel by the beach is full from June to September.",
    "Fresh fish is sold near the pier from Tuesday to Saturday.",
    "The teacher asked everyone to bring a warm coat and a pencil.",
    "A narrow path leads through the pines to a small spring.",
    "The festival in spring draws crowds from the whole region.",
    "Old letters from the war are kept in a wooden box upstairs.",
    "The river is low in August and one can cross it on foot.",
    "The doctor visits twice a month and stays for two days.",
    "On clear nights the lights of the harbor are visible from the hill.",
    "The cook prefers onions from the field behind the mill.",
    "The ferry does not run when the wind is strong.",
    "Two brothers repair bicycles in a yard near the canal.",
    "A painter from the north comes every autumn for the colors.",
    "Mushrooms grow in the forest after the first rain.",
)


@dataclass(frozen=True)
class Example:
    """A text, the beginning of one of its sentences as the question, and the rest of that sentence as the answer."""

    context: str
    question: str
    answer: str


def draw_examples(count: int, seed: str = "retrieval") -> list[Example]:
    """Draw examples; a larger `count` only adds to them."""
    return [_draw(Random(f"{seed}/{number}")) for number in range(count)]


def prompt_of(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return an example's prompt, the end of its context and the question, as token ids."""
    return tokenizer(example.context)["input_ids"][-CONTEXT_TOKENS:] + tokenizer(example.question)["input_ids"]


def _draw(rng: Random) -> Example:
    statements = rng.choices(list(STATEMENTS), k=FACTS)
    facts = [
        (statement.format(place), _answer(STATEMENTS[statement], rng))
        for statement, place in zip(statements, rng.sample(PLACES, FACTS), strict=True)
    ]
    context = scattered(rng, [f"{begin} {answer}." for begin, answer in facts])
    begin, answer = rng.choice(facts)
    return Example(context, f"\n\nAccording to the text: {begin}", f" {answer}")


def scattered(rng: Random, sentences: list[str]) -> str:
    """Return a text of all fillers with these sentences scattered among them, after the opening."""
    fillers = rng.sample(FILLERS, len(FILLERS))
    sentences = sentences + fillers[OPENING:]
    rng.shuffle(sentences)
    return " ".join(fillers[:OPENING] + sentences)


def _answer(kind: str, rng: Random) -> str:
    if kind == "code":
        return str(rng.randint(100, 999))
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


NAMES = 40  # in a list
LIST_QUESTION = "Repeat this list, and write nothing else."


def draw_names(number: int) -> list[str]:
    """Return the names of the list of that number, none twice."""
    return Random(f"names/{number}").sample(EVERYBODY, NAMES)


def numbered(names: list[str]) -> str:
    return "\n".join(f"{place}. {name}" for place, name in enumerate(names, 1))


def share_repeated(names: list[str], text: str) -> float:
    """Return the share of a list's names that a text has; how it separates them does not matter."""
    return sum(name in text for name in names) / len(names)
