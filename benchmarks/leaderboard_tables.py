"""The tables of all methods as the leaderboard reads them: answers of the verdict, and of RULER on a Qwen2."""

from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

import kvcompress
from lmms_eval_plugins.leaderboard.choice import choose
from lmms_eval_plugins.leaderboard.tables import Entry, Table

from . import ruler, verdict
from .driver import wrapped
from .method_cells import Answers, Cell, Task, cells_of
from .method_tasks import qwen2_list

REGIMES = {  # of the verdict -> as the leaderboard names what prompts hold; the model
    "tiny": ("an image", "tiny"),
    "tiny_multi_image": ("several images", "tiny"),
    "tiny_video": ("video", "tiny"),
    "tiny_read_all": ("an image, long answers", "tiny"),
    "smollm2": ("text", "SmolLM2-135M-Instruct"),
    "tiny_needle": ("long text", "tiny"),
}
QWEN2 = "Qwen2.5-Coder-0.5B-Instruct"
LISTS = 10  # questions of `method_table qwen2_list`
PACKAGES = ("kvcompress", "torch", "transformers")


def tables(folder: Path) -> Iterator[Table]:
    """Yield the tables whose answers are in `folder`, the benchmarks' results."""
    for name in verdict.REGIMES:
        file = folder / f"verdict_{name}.json"
        if file.exists():
            task = verdict.task_of(name)
            of_task = [(task, Answers(file, task.identity), cell) for cell in verdict.cells(task)]
            for drops in (False, True):
                own = [
                    one for one in of_task if one[2].method == "full" or verdict.drops_tokens(one[2].method) == drops
                ]
                yield from _table(*REGIMES[name], name, own, f"python -m benchmarks.verdict {name}", drops)
    for length, questions in ruler.QUESTIONS.items():
        files = {name: folder / "ruler_qwen2" / f"{name}_{length}.json" for name in ruler.TASKS}
        asked = [(ruler.task_of(name, length, questions), file) for name, file in files.items() if file.exists()]
        answered = [(task, Answers(file, task.identity)) for task, file in asked]
        begun = [(task, answers) for task, answers in answered if ruler.has_answers(task, answers)]
        if begun:
            found = [(task, answers, cell) for task, answers in begun for cell in ruler.all_cells(task)]
            name = f"RULER, {len(begun)} tasks, {length} tokens"
            yield from _table("text, long text", QWEN2, name, found, f"python -m benchmarks.ruler {length}", False)
    file = folder / "method_table_qwen2_list.json"
    if file.exists():
        yield from _of_lists(qwen2_list(LISTS), file)


def _of_lists(task: Task, file: Path) -> Iterator[Table]:
    """Yield the table of long answers, whose ratios are the budgets' shares of prompt and answer together."""
    prompts = task.inputs(slice(0, task.questions))["attention_mask"].sum(1).tolist()
    tokens = np.mean(prompts) + task.new_tokens

    def share(cell: Cell) -> float | None:
        budget = cell.column.options.get("decode_budget")
        return None if budget is None else round(budget / tokens, 2)

    answers = Answers(file, task.identity)
    found = [(task, answers, cell) for cell in cells_of(task, [*kvcompress.list_methods()])]
    command = f"python -m benchmarks.method_table {task.name} --questions {task.questions}"
    for table in _table("text, long answers", QWEN2, "a list repeated", found, command, False, share):
        yield table.model_copy(update={"protocol": {**table.protocol, "ratio_of": "prompt and answer"}})


def _table(
    regime: str,
    model: str,
    name: str,
    found: list[tuple[Task, Answers, Cell]],
    command: str,
    drops: bool,
    share: Callable[[Cell], float | None] = lambda cell: cell.column.ratio,
) -> Iterator[Table]:
    """Yield a table of the methods that have answered everything, if the full cache has; a method's draws are averaged.

    `share` returns the ratio of a cell, None for the full cache."""
    draws: dict[tuple[str, float | None], dict[str, list[np.ndarray]]] = {}
    kept: dict[tuple[str, float | None], list[float]] = {}
    tasks = {task.name: task for task, _, _ in found}
    for task, answers, cell in found:
        right, key = answers.of(cell, task.questions), (cell.method, share(cell))
        if len(right) == task.questions:
            draws.setdefault(key, {}).setdefault(task.name, []).append(right)
            if cell.key in answers.kept:
                kept.setdefault(key, []).append(float(np.mean(answers.kept[cell.key])))
    entries = [
        Entry(
            method=method,
            ratio=ratio,
            scores=np.concatenate([np.mean(of_task[name], axis=0) for name in tasks]).round(4).tolist(),
            kept=round(float(np.mean(kept[method, ratio])), 4) if (method, ratio) in kept else None,
        )
        for (method, ratio), of_task in draws.items()
        if of_task.keys() == tasks.keys()
    ]
    if not any(entry.method == "full" for entry in entries) or len(entries) < 2:
        return
    first = next(iter(tasks.values()))
    options = {name: str(value) for name, value in first.protocols[0].options.items()}
    if drops:  # these keep all text, and score all of the prompt
        options = {"first_token": options["first_token"]}
    yield Table(
        regime=regime,
        task=name,
        model=model,
        protocol={"ratio_of": "vision" if drops else "prompt", **options},
        metric="right",
        command=command,
        versions={package: version(package) for package in PACKAGES},
        clusters=[*first.shows] or None if len(tasks) == 1 else None,
        entries=entries,
    )


def sentences(found: list[Table]) -> str:
    """Return the choice of each table as a Markdown list."""
    lines = []
    for table in found:
        full = next(entry.scores for entry in table.entries if entry.method == "full")
        scores = {(one.method, one.ratio): one.scores for one in table.entries}
        if (chosen := choose(scores, full, table.clusters)) is not None:
            drops = ", by dropping vision tokens" * (table.protocol["ratio_of"] == "vision")
            model = "the bundled model" if table.model == "tiny" else table.model
            where = model if table.task in REGIMES else f"{table.task}, {model}"
            name = f"**{table.regime[0].upper()}{table.regime[1:]}** ({where}){drops}"
            lines.append(wrapped(f"- {name}: {chosen}", indent="  "))
    return "\n".join(lines)
