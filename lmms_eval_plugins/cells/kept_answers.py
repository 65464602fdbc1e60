"""Answers that are not scored yet: they are written before the scorers run, and the next run of the same command scores
them without the model. They are no cell: nothing reads them as results.

results/<task>/<model>/.answers-<cell>.json
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .results import dumps, write_text


@dataclass(frozen=True)
class KeptAnswers:
    """
    Attributes:
        rows: of all ranks, as `KVCompressLM.gather_rows` gives them; each has its `answer`.
        environment: where they were generated, as `run.environment` says it.
        overlays: for how many questions of each task the rows say which tokens were kept.
    """

    rows: list[dict[str, Any]]
    environment: dict[str, Any]
    overlays: int

    @property
    def questions(self) -> int:
        """How many are answered."""
        return len({(row["task"], row["doc_id"]) for row in self.rows})


def answers_file(cell_folder: Path) -> Path:
    """Beside the cell's folder. The name is hidden, so that it is no cell's."""
    return cell_folder.with_name(f".answers-{cell_folder.name}.json")


def write_kept_answers(cell_folder: Path, fingerprint: dict[str, Any], answers: KeptAnswers) -> None:
    """`fingerprint`: what the answers depend on."""
    cell_folder.parent.mkdir(parents=True, exist_ok=True)
    content = {"fingerprint": fingerprint, **vars(answers)}
    write_text(answers_file(cell_folder), dumps(content) + "\n")


def read_kept_answers(cell_folder: Path, fingerprint: dict[str, Any], overlays: int) -> KeptAnswers | None:
    """The answers for this fingerprint with as many overlays; None where there are none."""
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
