"""Draw questions about pictures of signs from a seed; needs only Pillow and numpy."""

from __future__ import annotations

from random import Random

from lmms_eval_plugins.tiny_vlm.questions import Example
from tiny_vlm.signs import draw_scene, questions


def draw_examples(count: int, kinds: tuple[str, ...], name: str) -> list[Example]:
    """Draw `count` questions, one per scene, cycling through `kinds`; `name` is the seed (training uses others)."""
    examples = []
    attempt = 0
    while len(examples) < count:
        rng = Random(f"{name}/{attempt}")
        attempt += 1
        scene = draw_scene(rng)
        kind = kinds[len(examples) % len(kinds)]
        possible = [question for question in questions(scene.signs) if question.kind == kind]
        if possible:
            examples.append(Example(scene.pixels, rng.choice(possible)))
    return examples
