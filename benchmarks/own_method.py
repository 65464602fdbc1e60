"""A search for a method of our own: the parts of the published ones, put together anew.

    python -m benchmarks.own_method search       # on one half of each bundled task's questions
    python -m benchmarks.own_method held-out     # the recipe that it found, on the other half and on another model

The search starts from the published method with the best mean over the tasks, and then changes one part after the
other, each time to what is best on its half: the scores of the other methods, the window and the pooling, how heads and
layers share the budget, and what becomes of evicted entries. It writes every step and the recipe into
`<out>/own_method_search.json`; `held-out` reads the recipe and asks what the search never asked. Answers are kept, so
that a run that was cut goes on. Both need the tables of benchmarks/method_table.py.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import kvcompress
from kvcompress.clusters.base import KVCluster
from kvcompress.files import write_text
from kvcompress.layer_budgets import list_layer_budgets
from kvcompress.methods import method_info
from kvcompress.policy.options import all_options
from kvcompress.scoring.merging import MERGES

from .method_cells import BY_RATIO, Answers, Cell, Task, cells_of, compute
from .method_table import RESULTS, RULERS
from .method_tasks import QUERY_AWARE, TASKS

SEARCHED = ("tiny", "tiny_read_all", "tiny_multi_image", "tiny_video", "tiny_needle")
NEVER_SEEN = "smollm2"
WINDOW = 8  # of queries, where a method looks on from some; as in the tables
PARTS = ("scorer", "window_size", "pooling", "kernel_size", "head_budget", "safeguard", "layer_budget", "merge")
VALUES = {
    "window_size": (4, 8, 16),
    "pooling": ("avg", "max"),
    "kernel_size": (1, 3, 5, 7),
    "head_budget": ("uniform", "shared", "adaptive"),
    "safeguard": (0.0, 0.2, 0.5),
    "layer_budget": ("uniform", *(name for name in list_layer_budgets() if name != "uniform")),
    "merge": ("none", *MERGES),
}
Recipe = dict[str, object]  # "method", and options of it


def half(task: Task, number: int) -> Task:
    """Every second batch of a task, from batch `number`, 0 or 1, on; of an odd number of batches the last is left out.
    Raises ValueError where there are less than two."""
    size = task.batch_size
    if task.questions < 2 * size:
        raise ValueError(f"{task.name}: {task.questions} questions are less than two batches of {size}")

    def of_whole(batch: slice) -> slice:
        start = 2 * batch.start + number * size
        return slice(start, start + batch.stop - batch.start)

    return replace(
        task,
        questions=task.questions // (2 * size) * size,
        inputs=lambda batch: task.inputs(of_whole(batch)),
        right=lambda batch, new: task.right(of_whole(batch), new),
        protocols=(QUERY_AWARE,),
    )


class Asked:
    """One half of some tasks, and what recipes answer there, computed when it is asked for."""

    def __init__(self, names: tuple[str, ...], number: int, questions: int, out: Path):
        self.tasks = {name: half(TASKS[name](questions), number) for name in names}
        identity = {name: f"{task.identity} half {number}" for name, task in self.tasks.items()}
        files = {name: out / f"own_method_{('search', 'held_out')[number]}_{name}.json" for name in names}
        self.answers = {name: Answers(files[name], identity[name]) for name in names}

    def right(self, name: str, recipe: Recipe) -> np.ndarray | None:
        """(ratios, questions) of a task, 0 or 1; None where the library refuses the recipe."""
        task, answers, cells = self.tasks[name], self.answers[name], cells_of_recipe(recipe)
        compute(task, cells, answers)
        if any(cell.key in answers.refused for cell in cells):
            return None
        return np.stack([answers.of(cell, task.questions) for cell in cells])

    def score(self, recipe: Recipe) -> float:
        """The mean over tasks and ratios, percent; -1 where a task refuses the recipe."""
        means = []
        for name in self.tasks:
            if (right := self.right(name, recipe)) is None:
                return -1.0
            means.append(100 * right.mean())
        return float(np.mean(means))


def cells_of_recipe(recipe: Recipe) -> list[Cell]:
    options = {name: value for name, value in recipe.items() if name != "method"}
    return [Cell(QUERY_AWARE, str(recipe["method"]), column, options) for column in BY_RATIO]


def published(name: str, out: Path, number: int, questions: int) -> dict[str, np.ndarray]:
    """Method -> (ratios, questions) of one half, from the answers of the method table."""
    task = TASKS[name](questions)
    answers = Answers(out / f"method_table_{name}.json", task.identity)
    asked = half(task, number).questions * 2
    batches = np.arange(asked) // task.batch_size
    found = {}
    for method in kvcompress.list_methods():
        cells = cells_of(replace(task, protocols=(QUERY_AWARE,)), [method])
        right = [answers.of(cell, task.questions) for cell in cells]
        if len(right) == len(BY_RATIO) and all(len(row) == task.questions for row in right):
            found[method] = np.stack(right)[:, :asked][:, batches % 2 == number]
    return found


def best_published(names: tuple[str, ...], out: Path, number: int, questions: int) -> list[tuple[str, float]]:
    """The clusters that answered everywhere, best first, with their means over tasks and ratios, percent."""
    tables = [published(name, out, number, questions) for name in names]
    shared = set.intersection(*map(set, tables)) - set(RULERS)
    shared = [name for name in shared if issubclass(method_info(name).cls, KVCluster)]
    means = {name: 100 * float(np.mean([table[name].mean() for table in tables])) for name in shared}
    return sorted(means.items(), key=lambda item: -item[1])


def changes(recipe: Recipe, part: str, scorers: list[str]) -> Iterator[Recipe]:
    """The recipe with another value of one part, where its method has that part."""
    if part == "scorer":
        for scorer in scorers:
            yield {**recipe, "method": scorer} | _window(scorer)
        return
    known = all_options(method_info(str(recipe["method"])))
    for value in VALUES[part] if part in known else ():
        if part != "safeguard" or {**known, **recipe}["head_budget"] != "uniform":
            yield {**recipe, part: value}


def _window(method: str) -> Recipe:
    return {"window_size": WINDOW} if "window_size" in method_info(method).options else {}


def search(asked: Asked, start: str, scorers: list[str], path: Path) -> Recipe:
    """One part after the other; a part stays as it is unless a change is better."""
    recipe: Recipe = {"method": start, **_window(start)}
    best, steps = asked.score(recipe), []
    steps.append({"part": "start", "recipe": recipe, "score": best})
    for part in PARTS:
        tried = [(asked.score(change), change) for change in changes(recipe, part, scorers)]
        steps += [{"part": part, "recipe": change, "score": score} for score, change in tried]
        top = max(tried, key=lambda pair: pair[0], default=(best, recipe))
        if top[0] > best:
            best, recipe = top
        print(f"{part}: {best:.1f} with {recipe}", flush=True)
        write_text(path, json.dumps({"recipe": recipe, "score": best, "steps": steps}, indent=1) + "\n")
    return recipe


def difference(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float]:
    """Ours - theirs over the same questions, in points, with its 95 % bootstrap interval; both (ratios, questions)."""
    per_question = 100 * (ours - theirs).mean(0)
    draws = np.random.default_rng(0).integers(len(per_question), size=(10_000, len(per_question)))
    low, high = np.percentile(per_question[draws].mean(1), [2.5, 97.5])
    return float(per_question.mean()), float(low), float(high)


def held_out(out: Path, recipe: Recipe, questions: int) -> str:
    """Markdown: of each task the recipe, the best published methods there, and the difference to the best."""
    lines = ["| task | recipe | best published | difference |", "| --- | ---: | --- | ---: |"]
    for name in (*SEARCHED, NEVER_SEEN):
        theirs = published(name, out, 1, questions)
        named = max((method for method in theirs if method not in RULERS), key=lambda method: theirs[method].mean())
        right = Asked((name,), 1, questions, out).right(name, recipe)
        if right is None:
            lines.append(f"| `{name}` | refused | {named} {100 * theirs[named].mean():.1f} | |")
            continue
        points, low, high = difference(right, theirs[named])
        lines.append(
            f"| `{name}` | {100 * right.mean():.1f} | {named} {100 * theirs[named].mean():.1f} "
            f"| {points:+.1f} [{low:+.1f}, {high:+.1f}] |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=["search", "held-out"])
    parser.add_argument("--questions", type=int, default=100, help="of a task, both halves together (default: 100)")
    parser.add_argument("--scorers", type=int, default=5, help="best published methods whose scores are tried (5)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = given.out / "own_method_search.json"
    if given.step == "search":
        names = [name for name, _ in best_published(SEARCHED, given.out, 0, given.questions)[: given.scorers]]
        search(Asked(SEARCHED, 0, given.questions, given.out), names[0], names, path)
    else:
        recipe = json.loads(path.read_text(encoding="utf-8"))["recipe"]
        text = held_out(given.out, recipe, given.questions)
        write_text(given.out / "own_method.md", text)
        print(text)


if __name__ == "__main__":
    main()
