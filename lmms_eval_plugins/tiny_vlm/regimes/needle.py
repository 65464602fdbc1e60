"""A long text of numbered facts, with or without a picture."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from lmms_eval_plugins.tiny_vlm.regimes.shown import WORDS, Shown
from lmms_eval_plugins.tiny_vlm.signs import DIGITS, HEADLINE_KINDS, LETTERS, Question, draw_scene, new_text
from lmms_eval_plugins.tiny_vlm.signs import questions as scene_questions

KINDS = ("k2v", "v2k")  # a word to its number, a number to its word; training asks for a fact's number too (f2v)
PICTURE_KINDS = tuple(f"i_{kind}" for kind in HEADLINE_KINDS)  # of the picture, with the text behind it
TOKENS = (1024, 4096)  # fewest and most of the text
PICTURE_SHARE = 0.5


def draw(rng: Random, tokens: tuple[int, int] = TOKENS, picture_share: float = PICTURE_SHARE) -> Shown:
    """A text of that many tokens, or up to one fact fewer, and a picture to `picture_share` of the texts."""
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
        room -= 1 + 3 + len(str(fact)) + len(word) + len(number) + 3 + 1 + 3
        if room < 0:
            break
        taken += (word, number)
        facts.append(f"fact {fact}: the number of {word} is {number}.\n")
        questions.append(Question("k2v", f"what is the number of {word}?", number))
        questions.append(Question("v2k", f"what word has the number {number}?", word))
        questions.append(Question("f2v", f"what number is in fact {fact}?", number))
    return Shown(questions, pictures, labels, text="".join(facts))
