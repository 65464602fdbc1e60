"""Store answers before they are scored, so that the next run of the same command can score them without the model if
scoring fails. Such a file is not a cell: nothing reads it as results.

results/<task>/<model>/.answers-<cell>.json
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompress.files import write_text

from .results import dumps


@dataclass(frozen=True)
class KeptAnswers:
    """The answers of a cell that has not been scored.

    Attributes:
        rows: the rows of all ranks, each with its `answer`, as `KVCompressLM.gather_rows` returns them.
        environment: where they were generated, as from `run.environment`.
        overlays: for how many questions of each task the rows record the kept tokens.
    """

    rows: list[dict[str, Any]]
    environment: dict[str, Any]
    overlays: int

    @property
    def questions(self) -> int:
        """The number of answered questions."""
        return len({(row["task"], row["doc_id"]) for row in self.rows})


def answers_file(cell_folder: Path) -> Path:
    """Return the path of the stored answers, beside the cell's folder. A hidden name is never taken for a cell."""
    return cell_folder.with_name(f".answers-{cell_folder.name}.json")


def write_kept_answers(cell_folder: Path, fingerprint: dict[str, Any], answers: KeptAnswers) -> None:
    """Store the answers of a cell; `fingerprint`: what they depend on."""
    cell_folder.parent.mkdir(parents=True, exist_ok=True)
    content = {"fingerprint": fingerprint, **vars(answers)}
    write_text(answers_file(cell_folder), dumps(content) + "\n")


def read_kept_answers(cell_folder: Path, fingerprint: dict[str, Any], overlays: int) -> KeptAnswers | None:
    """Return the stored answers for this fingerprint with at least as many overlays; None if there are none."""
    try:
        content = json.loads(answers_file(cell_folder).read_text(encoding="utf-8"))
        answers = KeptAnswers(content["rows"], content["environment"], content["overlays"])
        is_same = content["fingerprint"] == json.loads(dumps(fingerprint)) and answers.overlays >= overlays
        is_whole = isinstance(answers.environment, dict) and all(map(_is_answered, answers.rows))
    except (OSError, ValueError, KeyError, TypeError):  # absent, or damaged
        return None
    return answers if is_same and is_whole else None


def _is_answered(row: dict[str, Any]) -> bool:
    return isinstance(row["answer"], str) and isinstance(row["task"], str) and isinstance(row["doc_id"], int)
