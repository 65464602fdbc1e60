"""Cells on disk, as an evaluation leaves them, from answers written by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmms_eval_plugins.cells import results
from lmms_eval_plugins.cells.results import Cell


def write_answers(
    root: Path,
    task: str,
    method: str,
    ratio: float | None,
    answers: str,
    truth: str = "abcd",
    seconds: float = 1.0,
    tokens: int = 2,
    options: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    budget: int | None = None,
    model: str = "m",
    nested: bool = False,
    protocol: dict[str, Any] | None = None,
    docs: Sequence[dict[str, Any]] | None = None,
    realised: float | None = None,
    targets: Sequence[str] | None = None,
    is_lower_better: bool = False,
) -> Path:
    """Write a cell whose answers are the letters of `answers`, each correct if `truth` has the same letter.

    The first token of an answer takes `seconds`, each further one half of that. With `nested`, a question's score is
    inside other data, as video tasks return it. `protocol` adds settings, `docs` is the content of the task's
    documents, `targets` their right answers, and `realised` is the share that was kept, if it is not the ratio. With
    `is_lower_better` the task says so of its metric. Returns the folder of the cell's model."""
    cell = Cell(task, model, method, ratio, budget, options or {}, settings or {})
    scores = [float(answer == right) for answer, right in zip(answers, truth, strict=True)]
    whole = {
        "task": task, "model": model, "method": method, "ratio": ratio, "budget": budget,
        "settings": cell.settings, "changed_options": cell.options, **(protocol or {}),
    }  # fmt: skip
    measured = {"ttft_s": seconds, "tpot_s": seconds / 2 if tokens > 1 else None, "tokens_out": tokens}
    measured |= {"tokens_in": 100, "vision_tokens": 50, "kv_bytes_prompt": 4096}
    samples = [
        {
            "task": task,
            "doc_id": n,
            "input": f"What is {n}?",
            "filtered_resps": [answer],
            "acc": {"videoID": "v", "score": score} if nested else score,
            "measurement": measured,
            **({"doc": docs[n]} if docs else {}),
            **({"target": targets[n]} if targets else {}),
        }
        for n, (answer, score) in enumerate(zip(answers, scores, strict=True))
    ]
    content = {
        "protocol": whole,
        "results": {task: {"acc,none": sum(scores) / len(scores), "acc_stderr,none": 0.1}},
        "efficiency": {"realised_ratio": {"mean": realised or ratio or 0.3}, "tokens_out": {"median": tokens}},
    }
    if is_lower_better:
        content["configs"] = {task: {"metric_list": [{"metric": "acc", "higher_is_better": False}]}}
    with results.new_cell(cell.folder(root)) as draft:
        results.write_cell(draft, content, samples)
    return cell.folder(root).parent
