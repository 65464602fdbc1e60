"""Draw two to six pictures. Colours repeat among them, texts do not."""

from __future__ import annotations

from random import Random

from lmms_eval_plugins.tiny_vlm.questions import Question, Shown
from tiny_vlm.regimes.words import ORDINALS, WORDS
from tiny_vlm.signs import draw_scene

KINDS = ("p2n", "p2w", "t2p")  # picture and colour to number or word; text to picture


def draw(rng: Random, pictures: tuple[int, int] = (2, 6), signs: tuple[int, int] = (2, 4)) -> Shown:
    """Draw a prompt with several pictures; `pictures`: fewest and most; `signs`: fewest and most per picture."""
    taken: list[str] = []
    scenes = [draw_scene(rng, signs, taken, WORDS, noise=2) for _ in range(rng.randint(*pictures))]
    questions = []
    for ordinal, scene in zip(ORDINALS, scenes, strict=False):
        for sign in scene.signs:
            where = f"is on the {sign.color} sign of the {ordinal} picture?"
            if sign.number:
                questions.append(Question("p2n", f"what number {where}", sign.number))
            if sign.word:
                questions.append(Question("p2w", f"what word {where}", sign.word))
            # The answer's first token, which compression cannot change, gives nothing away.
            which = f"on which picture is the {sign.color} sign with {sign.lines[-1]}?"
            questions.append(Question("t2p", which, f"the {ordinal} picture", via=ordinal, holder=ordinal))
    return Shown(questions, [scene.pixels for scene in scenes], [scene.labels for scene in scenes])
