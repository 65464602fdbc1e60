"""Prompts and scores of `sign_presence`: whether a drawn picture has a sign of some colour or text, half of them no."""

import re
from typing import Any

from PIL import Image

SCALE = 3  # the pictures are drawn for the bundled model, whose letters are too small for other models


def doc_to_visual(doc: dict[str, Any]) -> list[Image.Image]:
    pictures = [image.convert("RGB") for image in doc["image_list"]]
    return [image.resize((SCALE * image.width, SCALE * image.height), Image.Resampling.BICUBIC) for image in pictures]


def doc_to_text(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, str]) -> str:
    return doc["question"] + lmms_eval_specific_kwargs["post_prompt"]


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score the first word of an answer; each question also counts for its kind, `present` or `absent`."""
    first = re.match(r"\W*(\w+)", results[0])
    score = float(first is not None and first[1].lower() == doc["answer"])
    return {"exact_match": score, doc["task"]: score}
