"""Draw a long text of numbered facts, with or without a picture."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

from lmms_eval_plugins.tiny_vlm.questions import Question, Shown
from tiny_vlm.regimes.words import WORDS
from tiny_vlm.signs import DIGITS, HEADLINE_KINDS, LETTERS, draw_scene, new_text
from tiny_vlm.signs import questions as scene_questions

KINDS = ("k2v",)  # a word to its number
BACKWARDS = ("v2k",)  # a number to its word; asked in training, as is a fact's number to its value (f2v)
PICTURE_KINDS = ("i_c2n", "i_c2w")  # about a sign in the picture before the text: its colour to number, to word
PICTURE_TEXTS = ("i_w2n", "i_n2w")  # one of its texts to the other; asked in training
TOKENS = (1024, 4096)  # fewest and most of the text; the most also bounds a bundled question's whole prompt
PICTURE_TOKENS = 351  # both views
QUESTION_TOKENS = 30  # at most, with the post prompt and the chat template
FACT = re.compile(r"fact (\d+): the number of ([a-z]+) is (\d+)\.\n")
FACT_TOKENS = 11  # besides the characters of the three groups, which are one token each
PICTURE_SHARE = 0.5


def draw(rng: Random, tokens: tuple[int, int] = TOKENS, picture_share: float = PICTURE_SHARE) -> Shown:
    """Draw a text of `tokens` (fewest, most), less up to one fact, with a picture at probability `picture_share`."""
    taken: list[str] = []
    pictures, labels, questions = [], [], []
    if rng.random() < picture_share:
        scene = draw_scene(rng, taken=taken, avoided=WORDS, noise=2)
        pictures, labels = [scene.pixels], [scene.labels]
        asked = [question for question in scene_questions(scene.signs) if question.kind in HEADLINE_KINDS]
        questions = [replace(question, kind=f"i_{question.kind}") for question in asked]
    room = rng.randint(*tokens)
    facts: list[str] = []
    while True:
        word, number = (new_text(rng, alphabet, taken, WORDS, shortest=3) for alphabet in (LETTERS, DIGITS))
        fact = len(facts) + 1
        # "fact", the spaces before the fact's number, the word and the number, "the number of", "is", ":.\n"
        room -= FACT_TOKENS + len(str(fact)) + len(word) + len(number)
        if room < 0:
            break
        taken += (word, number)
        facts.append(f"fact {fact}: the number of {word} is {number}.\n")
        questions.append(Question("k2v", f"what is the number of {word}?", number))
        questions.append(Question("v2k", f"what word has the number {number}?", word))
        questions.append(Question("f2v", f"what number is in fact {fact}?", number))
    return Shown(questions, pictures, labels, text="".join(facts))


def fits(shown: Shown) -> bool:
    """Return whether the whole prompt, with picture and question, is at most TOKENS[1] tokens long."""
    facts = sum(FACT_TOKENS + sum(map(len, fact)) for fact in FACT.findall(shown.text))
    return facts + PICTURE_TOKENS * len(shown.pictures) + QUESTION_TOKENS <= TOKENS[1]
