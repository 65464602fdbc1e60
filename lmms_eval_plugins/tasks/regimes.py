"""Prompts and scores of the bundled tasks with long answers, several pictures, video and long texts."""

from difflib import SequenceMatcher
from hashlib import blake2b
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME
from PIL import Image

from kvcompress.files import replacing

CLIPS = Path(HF_HOME) / "tiny_video"  # beside the videos that lmms-eval unpacks for other tasks


def doc_to_visual(doc: dict[str, Any]) -> list[Image.Image | str]:
    """Return the pictures, and the video's file name; the file is written if it does not exist."""
    visuals: list[Image.Image | str] = [image.convert("RGB") for image in doc["image_list"] or ()]
    video = doc["video"]
    if video and video["bytes"]:
        file = CLIPS / f"{blake2b(video['bytes'], digest_size=8).hexdigest()}-{video['path']}"
        if not file.exists():
            with replacing(file) as draft:
                draft.write_bytes(video["bytes"])
        visuals.append(str(file))
    return visuals


def doc_to_text(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, str]) -> str:
    kwargs = lmms_eval_specific_kwargs
    return f"{kwargs['pre_prompt']}{doc['context']}{doc['question'].capitalize()}{kwargs['post_prompt']}"


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"exact_match": float(_plain(results[0]) == _plain(doc["answer"]))}


def process_long_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Also score the share of signs read correctly and in order; signs that do not exist count as mistakes."""
    read, there = (_plain(answer).split(", ") for answer in (results[0], doc["answer"]))
    matches = SequenceMatcher(None, read, there, autojunk=False).get_matching_blocks()
    share = sum(match.size for match in matches) / max(len(read), len(there))
    return {**process_results(doc, results), "signs_read": share}


def _plain(answer: str) -> str:
    return answer.strip().rstrip(".").lower()
