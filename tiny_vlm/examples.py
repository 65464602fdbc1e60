"""Questions about pictures of signs, drawn from a seed; needs Pillow alone."""

from __future__ import annotations

from random import Random

from lmms_eval_plugins.tiny_vlm.questions import Example
from tiny_vlm.signs import draw_scene, questions


def draw_examples(count: int, kinds: tuple[str, ...], name: str) -> list[Example]:
    """`count` questions, one per scene, the kinds in turn; `name` is the seed (training's seeds differ)."""
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
