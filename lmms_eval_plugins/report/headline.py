"""The headline score of a cell, and of each of its questions.

lmms-eval names no main metric. The headline is the metric that covers the most questions; of several, one whose name
says that it summarises others; then the task's first.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..cells.results import number_of, score_key
from .metrics import tokens_per_correct

# Values that lmms-eval derives from a metric, and names that stand for "no metric".
DERIVED = re.compile(
    r"_stderr(_clt|_clustered)?$|_(expected_accuracy|consensus_accuracy|internal_variance|consistency_rate)$"
    r"|^bypass$|^submission$"
)
# Preferred among metrics over the same questions: a total, then the usual ones for captions and for boxes.
MAIN_NAMES = (
    re.compile(r"(^|_)(overall|average|avg|all|total|mean)(_|$)", re.IGNORECASE),
    re.compile(r"(^|_)cider$", re.IGNORECASE),
    re.compile(r"(^|_)acc@0\.5$", re.IGNORECASE),
)


@dataclass(frozen=True)
class Headline:
    """The headline score of a cell.

    Attributes:
        metric, filter: names, as in the key `exact_match,none` of lmms-eval's results.
        score: the score.
        stderr: its standard error; None if lmms-eval computed none.
        questions: how many questions the metric covers; None if the cell does not record it.
        tasks: the tasks averaged, more than one for a group that lmms-eval gives no score.
        is_lower_better: whether less is better, such as for an error rate.
        tokens_per_correct: tokens of all answers over the sum of the scores; None if the cell does not record it.
    """

    metric: str
    filter: str
    score: float
    stderr: float | None
    questions: int | None
    tasks: tuple[str, ...]
    tokens_per_correct: float | None = None
    is_lower_better: bool = False

    @property
    def name(self) -> str:
        """The name in a table: `seed_all`, `exact_match (flexible-extract)`, `wer (lower is better)`."""
        remarks = [self.filter] * (self.filter != "none") + ["lower is better"] * self.is_lower_better
        return f"{self.metric} ({', '.join(remarks)})" if remarks else self.metric


def headline(cell: dict[str, Any], metric: str | None = None, metric_filter: str | None = None) -> Headline | None:
    """Return the headline of a cell (its results.json); None if none of its metrics is a number.

    Args:
        metric, metric_filter: restrict the choice to this metric or answer filter.
    """
    task = cell["protocol"]["task"]
    own = _candidates(cell, task, metric, metric_filter)
    if own:
        return own[0]
    parts = [_candidates(cell, leaf, metric, metric_filter) for leaf in leaves(cell, task)]
    return _of_group(cell, [part for part in parts if part])


def why_none(cell: dict[str, Any], metric: str | None, metric_filter: str | None) -> str:
    """Say why `headline` returned None."""
    task = cell["protocol"]["task"]
    known = {found.name: found for leaf in (task, *leaves(cell, task)) for found in _candidates(cell, leaf, None, None)}
    asked = [f"{flag} {value}" for flag, value in (("--metric", metric), ("--filter", metric_filter)) if value]
    if not (known and asked):
        return "no score (was it run with --predict_only?)"
    return f"no score by {' '.join(asked)}, only by {', '.join(known)}"


def by_question(
    cell: dict[str, Any], samples: Iterable[dict[str, Any]], found: Headline | None
) -> list[tuple[dict[str, Any], float]]:
    """Return for each question its line of samples.jsonl after the headline's answer filter, and its headline score
    (NaN if the metric has no number per question)."""
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    for sample in samples:
        key = (sample["task"], sample["doc_id"])
        if key not in lines or (found is not None and sample.get("filter") == found.filter):
            lines[key] = sample
    metric = found.metric if found else ""
    return [(sample, number_of(sample.get(metric), score_key(cell, sample["task"]))) for sample in lines.values()]


def leaves(cell: dict[str, Any], task: str) -> list[str]:
    """Return the tasks of a group, including those of its subgroups; for a task, the task itself."""
    below = cell.get("group_subtasks", {}).get(task, [])
    return [leaf for name in below for leaf in leaves(cell, name)] or [task]


def _candidates(cell: dict[str, Any], task: str, metric: str | None, metric_filter: str | None) -> list[Headline]:
    """Return the numeric metrics of one task, the most suitable first."""
    scores, found = cell["results"].get(task, {}), []
    configs = cell.get("configs", {})  # of tasks, not of groups
    listed = [entry for leaf in leaves(cell, task) for entry in configs.get(leaf, {}).get("metric_list") or []]
    lower = {entry["metric"] for entry in listed if entry.get("higher_is_better") is False}
    for key, value in scores.items():
        name, comma, after = key.partition(",")
        wanted = metric in (None, name) and metric_filter in (None, after)
        if not comma or not wanted or DERIVED.search(name):
            continue
        if isinstance(value, int | float) and math.isfinite(value):
            stderr = scores.get(f"{name}_stderr,{after}")
            stderr = stderr if isinstance(stderr, int | float) and math.isfinite(stderr) else None
            questions, tokens = _questions(cell, task, key), None
            if name not in lower:
                tokens = _tokens_per_correct(cell, leaves(cell, task), key)
            found.append(Headline(name, after, value, stderr, questions, (task,), tokens, name in lower))
    names = [entry["metric"] for entry in listed]

    def order(found: Headline) -> tuple[int, int, int, str]:  # lmms-eval gives those of a group in any order
        rank = next((place for place, name in enumerate(MAIN_NAMES) if name.search(found.metric)), len(MAIN_NAMES))
        place = names.index(found.metric) if found.metric in names else len(names)
        return -(found.questions or 0), rank, place, found.metric

    return sorted(found, key=order)


def _questions(cell: dict[str, Any], task: str, key: str) -> int | None:
    """Return how many questions a metric covers; for a group with its own score, those of its tasks together."""
    counts = [cell.get("metric_questions", {}).get(leaf, {}).get(key) for leaf in leaves(cell, task)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _tokens_per_correct(cell: dict[str, Any], tasks: Iterable[str], key: str) -> float | None:
    """Return the tokens per correct answer of several tasks together; None if one of them does not record it."""
    sums = [cell.get("metric_tokens", {}).get(task, {}).get(key) for task in tasks]
    if None in sums:
        return None
    return tokens_per_correct([each["tokens_out"] for each in sums], [each["score"] for each in sums])


def _of_group(cell: dict[str, Any], parts: list[list[Headline]]) -> Headline | None:
    """Return the mean, over the questions of several tasks, of the first metric that all of them have."""
    for first in parts[0] if parts else []:
        same = [
            next((found for found in part if (found.metric, found.filter) == (first.metric, first.filter)), None)
            for part in parts
        ]
        if None in same:
            continue
        weights = [found.questions or 0 for found in same]
        total = sum(weights)
        if not total:  # the cell does not record it: weight tasks equally
            weights, total = [1] * len(same), len(same)
        score = sum(weight * found.score for weight, found in zip(weights, same, strict=True)) / total
        errors = [found.stderr for found in same]
        stderr = None
        if None not in errors:
            stderr = math.hypot(*(weight * error for weight, error in zip(weights, errors, strict=True))) / total
        known = all(found.questions is not None for found in same)
        tasks = tuple(task for found in same for task in found.tasks)
        key, is_lower = f"{first.metric},{first.filter}", any(found.is_lower_better for found in same)
        tokens = None if is_lower else _tokens_per_correct(cell, tasks, key)
        return Headline(first.metric, first.filter, score, stderr, total if known else None, tasks, tokens, is_lower)
    return None
