"""A search for a method of our own: the parts of the published ones, put together anew.

    python -m benchmarks.own_method search       # on one half of each bundled task's questions
    python -m benchmarks.own_method held-out     # the recipe that it found, on the other half and on another model

The search starts from the published method with the best mean over the tasks, and then changes one part after the
other, each time to what is best on its half: the scores of the other methods, the window and the pooling, how heads and
layers share the budget, and what becomes of evicted entries. It writes every step and the recipe into
`<out>/own_method_search.json`; `held-out` reads the recipe and asks what the search never asked, of the recipe, of the
recipe without each of its parts, and of the published methods that were best on the first half. Answers are kept, so
that a run that was cut goes on. Both begin with the tables of benchmarks/method_table.py.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
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

SEARCHED = {"tiny": 100, "tiny_read_all": 40, "tiny_multi_image": 40, "tiny_video": 40, "tiny_needle": 40}
HELD_OUT = {"tiny": 250, "tiny_read_all": 80, "tiny_multi_image": 100, "tiny_video": 80, "tiny_needle": 80}
NEVER_SEEN = {"smollm2": 40}  # whose answers choose its rivals; no recipe is asked
HELD_OUT |= {"smollm2": 120}  # as above, questions of both halves
COMPETITORS = 5  # the best published methods of a task, on the half that is not held out
OWN = "adamixkv"  # what the search found, which is not published
OWN_SCORES = "attention-and-leverage"  # of own_scores.py
PARTS = ("scorer", "blending", "window_size", "pooling", "kernel_size", "head_budget", "safeguard", "layer_budget")
PARTS += ("merge", "blending")  # the last again: how much depends on the parts between
VALUES = {
    "blending": (0.1, 0.3, 1.0, 3.0),
    "window_size": (1, 2, 4, 8, 16),
    "pooling": ("avg", "max"),
    "kernel_size": (1, 3, 5, 7, 9, 13, 17, 21),
    "head_budget": ("uniform", "shared", "adaptive"),
    "safeguard": (0.0, 0.2, 0.5),
    # Of those that keep to the budget: a search would find any other.
    "layer_budget": tuple(name for name, rule in list_layer_budgets().items() if rule.is_exact),
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
    """One half of some tasks, name -> questions of both halves, and what recipes answer there, computed when it is
    asked for."""

    def __init__(self, questions: dict[str, int], number: int, out: Path):
        self.tasks = {name: half(TASKS[name](asked), number) for name, asked in questions.items()}
        identity = {name: f"{task.identity} half {number}" for name, task in self.tasks.items()}
        files = {name: out / f"own_method_{('search', 'held_out')[number]}_{name}.json" for name in questions}
        self.answers = {name: Answers(files[name], identity[name]) for name in questions}

    def compute(self, name: str, recipes: list[Recipe]) -> None:
        """Answer what is missing of a task: the prefill once for all recipes."""
        compute(
            self.tasks[name], [cell for recipe in recipes for cell in self._cells(name, recipe)], self.answers[name]
        )

    def right(self, name: str, recipe: Recipe) -> np.ndarray | None:
        """(ratios, questions) of a task, 0 to 1; None where the library refuses the recipe."""
        self.compute(name, [recipe])
        cells, answers = self._cells(name, recipe), self.answers[name]
        if not cells or any(cell.key in answers.refused for cell in cells):
            return None
        return np.stack([answers.of(cell, self.tasks[name].questions) for cell in cells])

    def _cells(self, name: str, recipe: Recipe) -> list[Cell]:
        """As in the table of methods, with the recipe's options before the table's."""
        own = {option: value for option, value in recipe.items() if option != "method"}
        cells = cells_of(self.tasks[name], [str(recipe["method"])])
        return [replace(cell, options=cell.options | own) for cell in cells]

    def scores(self, recipes: list[Recipe]) -> list[float]:
        """Of each the mean over tasks and ratios, percent; -1 where a task refuses it."""
        for name in self.tasks:
            self.compute(name, recipes)
        return [self._score(recipe) for recipe in recipes]

    def _score(self, recipe: Recipe) -> float:
        right = [self.right(name, recipe) for name in self.tasks]
        return -1.0 if any(one is None for one in right) else 100 * float(np.mean([one.mean() for one in right]))


def published(name: str, out: Path, number: int, questions: int) -> dict[str, np.ndarray]:
    """Method -> (ratios, questions) of one half, from the answers of the method table to those questions of the half
    that `random` answered, and of the methods that answered them."""
    task = replace(TASKS[name](questions), protocols=(QUERY_AWARE,))
    answers = Answers(out / f"method_table_{name}.json", task.identity)
    right = {
        method: [answers.of(cell, task.questions) for cell in cells_of(task, [method])]
        for method in kvcompress.list_methods()
    }
    asked = np.arange(min(map(len, right["random"])))
    asked = asked[asked // task.batch_size % 2 == number]
    return {
        method: np.stack([row[asked] for row in rows])
        for method, rows in right.items()
        if len(rows) == len(BY_RATIO) and min(map(len, rows)) > asked[-1]
    }


def best_published(names: Iterable[str], out: Path) -> list[tuple[str, float]]:
    """The clusters that answered the searched half of each task, best first, with their means over tasks and ratios,
    percent. What drops vision tokens before they are cached is left out: its ratio counts these alone, and no text."""
    tables = [published(name, out, 0, {**SEARCHED, **NEVER_SEEN}[name]) for name in names]
    shared = set.intersection(*map(set, tables)) - {*RULERS, OWN}
    shared = {name for name in shared if issubclass(method_info(name).cls, KVCluster)}
    means = {name: 100 * float(np.mean([table[name].mean() for table in tables])) for name in shared}
    return sorted(means.items(), key=lambda item: -item[1])


def changes(recipe: Recipe, part: str, scorers: list[str]) -> Iterator[Recipe]:
    """The recipe with another value of one part, where its method has that part."""
    known = all_options(method_info(str(recipe["method"])), recipe.get("scorer"))
    if part == "scorer":
        for scorer in scorers:
            if scorer != recipe["method"]:
                yield without_unknown({**recipe, part: scorer})
    elif part in known and (part != "safeguard" or {**known, **recipe}["head_budget"] != "uniform"):
        yield from ({**recipe, part: value} for value in VALUES[part])


def without_unknown(recipe: Recipe) -> Recipe:
    """Without the options that its scores do not take."""
    takes = {"method", *all_options(method_info(str(recipe["method"])), recipe.get("scorer"))}
    return {name: value for name, value in recipe.items() if name in takes}


def search(asked: Asked, start: str, scorers: list[str], path: Path) -> Recipe:
    """One part after the other; a part stays as it is unless a change is better."""
    info = method_info(start)
    recipe: Recipe = {"method": start, "head_budget": info.cls.head_budget, "layer_budget": info.cls.layer_budget}
    recipe |= {part: info.options[part] for part in ("pooling", "kernel_size") if part in info.options}
    best = asked.scores([recipe])[0]
    steps = [{"part": "start", "recipe": recipe, "score": best}]
    for part in PARTS:
        tried = list(changes(recipe, part, scorers))
        scores = asked.scores(tried)
        steps += [{"part": part, "recipe": change, "score": score} for change, score in zip(tried, scores, strict=True)]
        if tried and max(scores) > best:
            best = max(scores)
            recipe = tried[scores.index(best)]
        print(f"{part}: {best:.1f} with {recipe}", flush=True)
        write_text(path, json.dumps({"recipe": recipe, "score": best, "steps": steps}, indent=1) + "\n")
    return recipe


def difference(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float, float]:
    """Ours - theirs, in points, the mean of one or more tasks, with its 95 % bootstrap interval. A pair is of one task,
    both (ratios, questions); each task's questions are drawn anew for itself."""
    generator, means, drawn = np.random.default_rng(0), [], []
    for ours, theirs in pairs:
        per_question = 100 * (ours - theirs).mean(0)
        draws = generator.integers(len(per_question), size=(10_000, len(per_question)))
        means.append(per_question.mean())
        drawn.append(per_question[draws].mean(1))
    low, high = np.percentile(np.mean(drawn, axis=0), [2.5, 97.5])
    return float(np.mean(means)), float(low), float(high)


def ablations(recipe: Recipe) -> dict[str, Recipe]:
    """Part -> the recipe with what its method has in this place; only where that is something else."""
    cls = method_info(str(recipe["method"])).cls
    changed = [part for part in recipe if part != "method" and recipe[part] != getattr(cls, part, None)]
    return {part: without_unknown({name: value for name, value in recipe.items() if name != part}) for part in changed}


def held_out(out: Path, recipe: Recipe) -> str:
    """Markdown: the recipe beside the best published method, on each task and in the mean of those that were searched;
    and what each part of it brings. The rivals are the best of the searched half, of the task and of all."""
    without = ablations(recipe)
    overall = [method for method, _ in best_published(SEARCHED, out)[:COMPETITORS]]
    lines = ["| task | questions | recipe | best published | difference |", "| --- | ---: | ---: | --- | ---: |"]
    parts = [f"| task | {' | '.join(without)} |", "| --- |" + " ---: |" * len(without)]
    searched: list[dict[str, np.ndarray]] = []  # of each such task the answers of the recipe, "", and of `overall`
    for name, questions in HELD_OUT.items():
        there = [method for method, _ in best_published([name], out)[:COMPETITORS]]
        rivals: dict[str, Recipe] = {method: {"method": method} for method in dict.fromkeys([*there, *overall])}
        asked = Asked({name: questions}, 1, out)
        asked.compute(name, [recipe, *rivals.values(), *without.values()])
        right = {method: asked.right(name, rival) for method, rival in {"": recipe, **rivals}.items()}
        if right[""] is None:
            lines.append(f"| `{name}` | {asked.tasks[name].questions} | refused | | |")
            continue
        if name in SEARCHED:
            searched.append(right)
        best = max(rivals, key=lambda method: right[method].mean())
        lines.append(f"| `{name}` | {right[''].shape[1]} | {compared([right], best)} |")
        taken = [asked.right(name, one) for one in without.values()]
        cells = ["refused" if one is None else in_points(*difference([(right[""], one)])) for one in taken]
        parts.append(f"| `{name}` | {' | '.join(cells)} |")
    if searched:
        best = max(overall, key=lambda method: np.mean([right[method].mean() for right in searched]))
        lines.append(f"| mean of those searched | | {compared(searched, best)} |")
    return "\n".join([*lines, "", "What each part brings:", "", *parts]) + "\n"


def compared(tasks: list[dict[str, np.ndarray]], best: str) -> str:
    """The recipe, the best published method, and the difference, as cells of a row."""
    ours, theirs = (100 * np.mean([right[method].mean() for right in tasks]) for method in ("", best))
    points = in_points(*difference([(right[""], right[best]) for right in tasks]))
    return f"{ours:.1f} | {best} {theirs:.1f} | {points}"


def in_points(mean: float, low: float, high: float) -> str:
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=["search", "held-out"])
    parser.add_argument("--scorers", type=int, default=6, help="best published methods whose scores are tried (6)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    from . import own_scores  # noqa: F401 (registers a method, which is no business of who imports this file)

    path = given.out / "own_method_search.json"
    if given.step == "search":
        best = [name for name, _ in best_published(SEARCHED, given.out)][: given.scorers]
        search(Asked(SEARCHED, 0, given.out), best[0], [*best, OWN_SCORES], path)
    else:
        found = json.loads(path.read_text(encoding="utf-8"))
        text = held_out(given.out, found["recipe"])
        write_text(given.out / "own_method.md", text)
        print(text)


if __name__ == "__main__":
    main()
