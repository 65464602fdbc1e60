"""Prompts and scores of the tasks that `python -m lmms_eval_plugins.long_pack` writes.

The scorers are those of lmms-eval's own `mmlongbench` and `mmlongbench_doc`. Each question also counts for a metric
named after its kind.
"""

from typing import Any

from lmms_eval.tasks.mmlongbench.utils import mmlongbench_process_results
from lmms_eval.tasks.mmlongbench_doc.utils import mmlongbench_doc_process_results
from PIL import Image


def doc_to_visual(doc: dict[str, Any]) -> list[Image.Image]:
    return [image.convert("RGB") for image in doc["image_list"]]


def doc_to_text(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, str]) -> str:
    """Return the whole text of a needle's prompt, for models that cannot interleave images."""
    return "".join([*doc["texts"], _asked(doc, lmms_eval_specific_kwargs)])


def doc_to_messages(doc: dict[str, Any], lmms_eval_specific_kwargs: dict[str, str]) -> list[dict[str, Any]]:
    """Return a needle's prompt: each image after its text, and the question at the end."""
    content: list[dict[str, Any]] = []
    for text, image in zip(doc["texts"], doc_to_visual(doc), strict=True):
        content += [{"type": "text", "text": text}, {"type": "image", "url": image}]
    content.append({"type": "text", "text": _asked(doc, lmms_eval_specific_kwargs)})
    return [{"role": "user", "content": content}]


def needle_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score a needle: the response contains the answer; or, for counts, its bracketed numbers sum to it."""
    answer = [int(doc["answer"])] if doc["answer_format"] == "List" else doc["answer"]
    score = mmlongbench_process_results({**doc, "answer": answer}, results)["mmlongbench_acc"]["score"]
    return {"mmlongbench_acc": score, doc["kind"]: score}


def document_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score a document's question by its answer format: the response's first number, or its text's ANLS."""
    score = mmlongbench_doc_process_results(doc, results)["mmlongbench_doc_acc"]["score"]
    return {"mmlongbench_doc_acc": score, doc["kind"]: score}


def _asked(doc: dict[str, Any], kwargs: dict[str, str]) -> str:
    return f"{kwargs['pre_prompt']}{doc['question']}{kwargs['post_prompt']}"
