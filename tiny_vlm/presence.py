"""Draw the questions of the task `sign_presence`, for models other than the bundled one: `python -m tiny_vlm.presence`.

Each picture has two: of a colour or text that one of its signs has, and of one that none has. So a model that always
says yes is right half the time.
"""

from __future__ import annotations

import argparse
from random import Random

from lmms_eval_plugins.tasks import BUNDLED_TASKS
from lmms_eval_plugins.tiny_vlm.dataset import write_table
from lmms_eval_plugins.tiny_vlm.questions import Question, Shown
from tiny_vlm.regimes.dataset import table_of
from tiny_vlm.signs import COLORS, DIGITS, LETTERS, Scene, draw_scene, new_text

PICTURES = 150
TASK = "sign_presence"
FILE = BUNDLED_TASKS / TASK / "questions.parquet"


def draw_pictures(count: int, seed: str = "validation") -> list[tuple[Scene, list[Question]]]:
    """Draw scenes, each with a question whose answer is yes and one whose answer is no, in random order; colours and
    texts are asked for in turn."""
    return [_draw(Random(f"{seed}/presence/{number}"), number % 2 == 0) for number in range(count)]


def _draw(rng: Random, asks_color: bool) -> tuple[Scene, list[Question]]:
    taken: list[str] = []  # every text of the picture, those without a sign too
    scene = draw_scene(rng, taken=taken)
    if asks_color:
        there = [sign.color for sign in scene.signs]
        absent = rng.choice([color for color in COLORS if color not in there])
        form = "Is there {} sign?"
        pair = [
            form.format(f"an {color}" if color == "orange" else f"a {color}") for color in (rng.choice(there), absent)
        ]
    else:
        lines = [line for sign in scene.signs for line in sign.lines]
        alphabet = DIGITS if rng.choice(lines)[0] in DIGITS else LETTERS  # so that the form does not tell
        texts = rng.choice(lines), new_text(rng, alphabet, taken)
        pair = [f"Is there a sign that says {text.upper()}?" for text in texts]  # signs have capital letters
    questions = [Question("present", pair[0], "yes"), Question("absent", pair[1], "no")]
    rng.shuffle(questions)
    return scene, questions


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    prompts = [Shown([question], [scene.pixels]) for scene, asked in draw_pictures(PICTURES) for question in asked]
    write_table(table_of(TASK, prompts), FILE, "zstd")
    print(f"{FILE}: {len(prompts)} questions, {FILE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
