"""What a question belongs to: questions of one cluster are not independent of each other."""

from typing import Any

from ..cells.errors import UsageError
from .headline import Headline


def cluster_of(cell: dict[str, Any], sample: dict[str, Any], found: Headline | None, key: str | None = None) -> str:
    """Return the cluster of a question, a line of samples.jsonl.

    It is the value of the field `key`; by default of the field that the task's `cluster_key` names, in the score of the
    cell's headline or in the document; else the images and videos that the question shows; else the question itself.

    Raises UsageError if the question has no field `key`.
    """
    task, score, doc = sample["task"], sample.get(found.metric) if found else None, sample.get("doc")
    fields = {"doc_id": sample["doc_id"]}
    fields |= {name: value for part in (doc, score) if isinstance(part, dict) for name, value in part.items()}
    own = cell.get("configs", {}).get(task, {}).get("cluster_key")
    if key is not None and fields.get(key) is None:
        names = ", ".join(sorted(fields))
        raise UsageError(f"--cluster {key}: question {sample['doc_id']} of {task!r} has no such field, but {names}")
    if (value := fields.get(key or own)) is not None:
        return f"{task}/{value}"
    return sample.get("measurements", [sample["measurement"]])[0].get("shows") or f"{task}/{sample['doc_id']}"
