"""A search for a method of our own: the parts of the published ones, put together anew.

    python -m benchmarks.own_method search       # on one half of the questions of every regime
    python -m benchmarks.own_method held-out     # the recipe that it found, on the other half and on another model
    python -m benchmarks.own_method confirm      # new questions, where the held-out ones were too few to tell

The search starts from the published method with the best mean over the tasks, and then changes one part after the
other: the scores of the other methods and whether they are calibrated, the window and the pooling, how heads and
layers share the budget, what becomes of evicted entries, and how often a long answer is compressed. The best change of
a part is taken where its 95 % interval against the recipe so far is above zero. Every step and the recipe are written
into `<out>/own_method_search.json`; `held-out` reads the recipe and asks what the search never asked, of the recipe, of
the recipe without each of its parts, and of the published methods that were best on the first half; `confirm` asks
the recipe and the best of these again. Answers are kept, so that a run that was cut goes on. All begin with the tables
of benchmarks/method_table.py.
"""

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import kvcompress
from kvcompress.bench.timing import table
from kvcompress.clusters.base import KVCluster
from kvcompress.clusters.calibrated import CalibratedKVCluster
from kvcompress.files import write_text
from kvcompress.flag_types import path, whole
from kvcompress.hooks.shared_prompt import PromptPass
from kvcompress.methods import method_info
from kvcompress.policy.options import all_options

from .driver import RESULTS, new_parser, start
from .method_cells import Answers, Cell, Column, Protocol, Task, cells_of, compute
from .method_table import RULERS
from .method_tasks import QUERY_AWARE, RULER, TASKS

# Task -> questions of both halves; those that take longest first.
SEARCHED = {"smollm2_ruler": 20, "smollm2": 40, "tiny_read_all": 40, "tiny_needle": 40, "tiny_video": 40}
SEARCHED |= {"tiny_multi_image": 40, "tiny": 100}
HELD_OUT = {"smollm2_ruler": 20, "smollm2": 120, "tiny_read_all": 80, "tiny_needle": 40, "tiny_video": 80}
HELD_OUT |= {"tiny_multi_image": 100, "tiny": 200, "gemma3_ruler": 40}
# Where the recipe is ahead on the held-out half, but not by more than its interval: task -> all questions, of which
# those are asked that no half had, and the best published methods of the held-out half that are near each other.
CONFIRMED = {"smollm2_ruler": (60, ["r-kv", "leverage"]), "smollm2": (220, ["r-kv"])}
CONFIRMED |= {"tiny_video": (280, ["r-kv", "adakv", "lava"]), "tiny_multi_image": (300, ["adakv", "lava"])}
# Tasks without a table: whose best are asked there, and what was best there when it was asked.
RIVALS_OF = {"smollm2_ruler": ("smollm2", ["leverage"]), "gemma3_ruler": ("smollm2", ["leverage"])}
SEARCHING = Protocol("search", QUERY_AWARE.options, tuple(map(Column.of, (0.2, 0.05))))
BUDGETS = Protocol(
    "decode budgets",
    {"first_token": "compressed"},
    tuple(Column(f"{budget}", None, {"budget": budget, "decode_budget": budget}) for budget in (96, 48)),
)
NEVER_SEEN = "gemma3_ruler"
WHOLE_FIRST = Protocol("first token from the whole cache", {"scope": "prompt"})  # all that sliding windows allow
LONG_ANSWERS = "tiny_read_all"  # where the schedule is searched and held out, under BUDGETS
INTERVAL = 8  # decode steps between two evictions, where a recipe names none
COMPETITORS = 3  # the best published methods of a task, on the half that is not held out
FIRST = "adamixkv"  # what the first search found, which is not published
OWN_SCORES = "attention-and-leverage"  # of own_scores.py
PARTS = ("scorer", "calibrated", "blending", "window_size", "pooling", "kernel_size", "head_budget", "safeguard")
PARTS += ("layer_budget", "merge", "balance")
VALUES = {
    "calibrated": (True,),
    "blending": (0.1, 0.3, 1.0, 3.0),
    "balance": (0.03, 0.15, 0.3, 0.6),
    "window_size": (2, 4, 8, 16),
    "pooling": ("avg", "max"),
    "kernel_size": (5, 7, 9, 13),
    "head_budget": ("uniform", "shared", "adaptive"),
    "safeguard": (0.0, 0.2, 0.5),
    # One of each kind that keeps to the budget (a search would find any other), and what lost no ten points in the
    # first search, over the bundled tasks.
    "layer_budget": ("pyramid-effivlm", "global", "cake", "lava"),
    "merge": ("cam", "pivot"),
    "decode_interval": (1, 4, 16, 32),
}
FORK = multiprocessing.get_context("fork")  # which hands models over as they are
Recipe = dict[str, object]  # "method", "calibrated", and options of it


def half(task: Task, number: int) -> Task:
    """Every second batch of a task, from batch `number`, 0 or 1, on; of an odd number of batches the last is left out.
    Raises ValueError where there are less than two."""
    size = task.batch_size
    if task.questions < 2 * size:
        raise ValueError(f"{task.name}: {task.questions} questions are less than two batches of {size}")
    return _part(task, task.questions // (2 * size) * size, lambda start: 2 * start + number * size)


def later(task: Task, first: int) -> Task:
    """A task's questions from `first` on."""
    return _part(task, task.questions - first, lambda start: first + start)


def _part(task: Task, questions: int, place: Callable[[int], int]) -> Task:
    """Some batches of a task; `place`: first question of a batch -> its place in the task."""

    def of_whole(batch: slice) -> slice:
        start = place(batch.start)
        return slice(start, start + batch.stop - batch.start)

    return replace(
        task,
        questions=questions,
        inputs=lambda batch: task.inputs(of_whole(batch)),
        right=lambda batch, new: task.right(of_whole(batch), new),
    )


class Asked:
    """One half of some tasks, name -> questions of both halves, and what recipes answer there, computed when it is
    asked for; with `processes` the tasks are spread over so many. Number 2: what comes after both halves."""

    def __init__(
        self,
        questions: dict[str, int],
        number: int,
        out: Path,
        protocol: Protocol = QUERY_AWARE,
        processes: int = 0,
    ):
        makers = TASKS | RULER
        self.protocol = protocol
        whole = {name: makers[name](asked) for name, asked in questions.items()}
        parts = {name: half(it, number) if number < 2 else later(it, HELD_OUT[name]) for name, it in whole.items()}
        self.tasks = {name: replace(part, protocols=(protocol,)) for name, part in parts.items()}
        step = ("search", "held_out", "confirm")[number]
        self.files = {name: out / f"own_method_{step}_{name}.json" for name in questions}
        self.identities = {name: f"{task.identity} half {number}" for name, task in self.tasks.items()}
        self.prompts: dict[tuple[str, int], PromptPass] = {}
        self.pools = [_forked(self) for _ in range(processes)]

    def answers(self, name: str) -> Answers:
        return Answers(self.files[name], self.identities[name])

    def compute(self, names: Iterable[str], recipes: list[Recipe]) -> None:
        """Answer what is missing of tasks: the prefill once for all recipes."""
        for name in names:
            cells = [cell for recipe in recipes for cell in self._cells(name, recipe)]
            compute(self.tasks[name], cells, self.answers(name), self.prompts)

    def right(self, name: str, recipe: Recipe) -> np.ndarray | None:
        """(columns, questions) of a task, 0 to 1; None where the library refuses the recipe."""
        self.compute([name], [recipe])
        cells, answers = self._cells(name, recipe), self.answers(name)
        if not cells or any(cell.key in answers.refused for cell in cells):
            return None
        return np.stack([answers.of(cell, self.tasks[name].questions) for cell in cells])

    def _cells(self, name: str, recipe: Recipe) -> list[Cell]:
        """As in the table of methods, with the recipe's options before the table's; none for a recipe that is
        calibrated, on a model that is not."""
        task = self.tasks[name]
        own = {option: value for option, value in recipe.items() if option not in ("method", "calibrated")}
        if self.protocol == BUDGETS:
            own.setdefault("decode_interval", INTERVAL)
        else:
            own.pop("decode_interval", None)
        cells = [replace(cell, options=cell.options | own) for cell in cells_of(task, [str(recipe["method"])])]
        if recipe.get("calibrated"):
            file = task.calibrations and task.calibrations / f"{recipe.get('scorer', recipe['method'])}.safetensors"
            return [replace(cell, calibration=file) for cell in cells] if file and file.exists() else []
        return cells

    def all_right(self, recipes: list[Recipe]) -> list[list[np.ndarray] | None]:
        """Of each the answers to every task; None where a task refuses it."""
        if self.pools:
            names = list(self.tasks)
            parts = [names[number :: len(self.pools)] for number in range(len(self.pools))]
            for done in [pool.submit(_compute, part, recipes) for pool, part in zip(self.pools, parts, strict=True)]:
                done.result()
        found = [[self.right(name, recipe) for name in self.tasks] for recipe in recipes]
        return [None if any(one is None for one in right) else right for right in found]


_asked: Asked | None = None  # in a process of a pool


def _forked(asked: Asked) -> ProcessPoolExecutor:
    """One process that has the tasks' models, and keeps their prefills from one part of the search to the next."""

    def begin() -> None:
        global _asked
        _asked = asked
        torch.set_num_threads(1)  # the threads of a forked process's parent are not there

    return ProcessPoolExecutor(1, FORK, begin)


def _compute(names: list[str], recipes: list[Recipe]) -> None:
    _asked.compute(names, recipes)


def published(name: str, out: Path, number: int, questions: int) -> dict[str, np.ndarray]:
    """Method -> (ratios, questions) of one half, from the answers of the method table to those questions of the half
    that `random` answered, and of the methods that answered them."""
    task = replace(TASKS[name](questions), protocols=(QUERY_AWARE,))
    columns = len(task.protocols[0].columns)
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
        if len(rows) == columns and min(map(len, rows)) > asked[-1]
    }


def best_published(names: Iterable[str], out: Path) -> list[tuple[str, float]]:
    """The clusters that answered the searched half of each task, best first, with their means over tasks and ratios,
    percent. What drops vision tokens before they are cached is left out: its ratio counts these alone, and no text."""
    tables = [published(name, out, 0, SEARCHED[name]) for name in names if name in TASKS]
    shared = set.intersection(*map(set, tables)) - {*RULERS, FIRST}
    shared = {name for name in shared if issubclass(method_info(name).cls, KVCluster)}
    means = {name: 100 * float(np.mean([table[name].mean() for table in tables])) for name in shared}
    return sorted(means.items(), key=lambda item: -item[1])


def changes(recipe: Recipe, part: str, scorers: list[str]) -> Iterator[Recipe]:
    """The recipe with another value of one part, where its method has that part."""
    cls = method_info(str(recipe.get("scorer", recipe["method"]))).cls
    known = all_options(method_info(str(recipe["method"])), recipe.get("scorer"))
    if part == "scorer":
        for scorer in scorers:
            if scorer != recipe["method"]:
                yield without_unknown({**recipe, part: scorer})
    elif part == "calibrated" and not issubclass(cls, CalibratedKVCluster):
        return
    elif part in {"calibrated", *known} and (part != "safeguard" or {**known, **recipe}["head_budget"] != "uniform"):
        yield from ({**recipe, part: value} for value in VALUES[part] if recipe.get(part) != value)


def without_unknown(recipe: Recipe) -> Recipe:
    """Without the options that its scores do not take."""
    takes = {"method", "calibrated", *all_options(method_info(str(recipe["method"])), recipe.get("scorer"))}
    return {name: value for name, value in recipe.items() if name in takes}


def search(asked: Asked, schedules: Asked, start: str, scorers: list[str], file: Path) -> Recipe:
    """One part after the other, the schedule last, on `schedules`; a part stays as it is unless the best of its changes
    is better by more than its interval."""
    info = method_info(start)
    recipe: Recipe = {"method": start, "head_budget": info.cls.head_budget, "layer_budget": info.cls.layer_budget}
    recipe |= {part: info.options[part] for part in ("pooling", "kernel_size") if part in info.options}
    steps: list[dict] = []
    for part in (*PARTS, "decode_interval"):
        where = schedules if part == "decode_interval" else asked
        tried = list(changes(recipe, part, scorers))
        so_far, *found = where.all_right([recipe, *tried])
        steps.append({"part": part, "recipe": recipe, "score": score(so_far)})
        for change, right in zip(tried, found, strict=True):
            gain = None if right is None else difference(list(zip(right, so_far, strict=True)))
            steps.append({"part": part, "recipe": change, "score": score(right), "gain": gain})
        better = [step for step in steps if step["part"] == part and (step.get("gain") or (0, 0, 0))[1] > 0]
        if better:
            recipe = max(better, key=lambda step: step["score"])["recipe"]
        print(f"{part}: {recipe}", flush=True)
        write_text(file, json.dumps({"recipe": recipe, "steps": steps}, indent=1) + "\n")
    return recipe


def score(right: list[np.ndarray] | None) -> float | None:
    """The mean over tasks and columns, percent; None where a task refuses the recipe."""
    return None if right is None else 100 * float(np.mean([one.mean() for one in right]))


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


def regimes() -> list[tuple[str, Protocol]]:
    """What is held out: each task, and long answers a second time, within a budget."""
    asked = [(name, WHOLE_FIRST if name == NEVER_SEEN else QUERY_AWARE) for name in HELD_OUT]
    return asked + [(name, BUDGETS) for name in HELD_OUT if name == LONG_ANSWERS]


def rivals_of(name: str, out: Path, overall: list[str]) -> list[str]:
    """The published methods that were best on the searched half, of the task and of all (`overall`)."""
    table, more = RIVALS_OF.get(name, (name, []))
    there = [method for method, _ in best_published([table], out)[:COMPETITORS]]
    return list(dict.fromkeys([*there, *overall, *more]))


def answer_held_out(out: Path, recipe: Recipe, overall: list[str], regime: tuple[str, Protocol]) -> dict[str, object]:
    """Of one regime the answers of the recipe, "", of its rivals, of the first search's method, and of the recipe
    without each part, under its name and a dash before it; None where the library refuses it."""
    name, protocol = regime
    asked = Asked({name: HELD_OUT[name]}, 1, out, protocol)
    # What evicts less often holds more in between: all have the recipe's schedule.
    schedule = {option: recipe[option] for option in ("decode_interval",) if option in recipe}
    recipes: dict[str, Recipe] = {"": recipe}
    recipes |= {method: {"method": method, **schedule} for method in [*rivals_of(name, out, overall), FIRST]}
    recipes |= {f"-{part}": one for part, one in ablations(recipe).items()}
    asked.compute([name], list(recipes.values()))
    return {title: asked.right(name, one) for title, one in recipes.items()}


def held_out(out: Path, recipe: Recipe, processes: int = 0) -> str:
    """Markdown: the recipe beside the best published method, on each task and in the mean of those that were searched;
    and what each part of it brings."""
    overall = [method for method, _ in best_published(SEARCHED, out)[:COMPETITORS]]
    lines, parts, without = [], [], list(ablations(recipe))
    searched: list[dict[str, np.ndarray]] = []  # of each such task the answers of the recipe, "", and of `overall`
    answer = partial(answer_held_out, out, recipe, overall)
    if processes:
        with ProcessPoolExecutor(processes, FORK, torch.set_num_threads, (1,)) as pool:
            answered = list(pool.map(answer, regimes()))
    else:
        answered = list(map(answer, regimes()))
    for (name, protocol), right in zip(regimes(), answered, strict=True):
        title = f"`{name}`" if protocol == QUERY_AWARE else f"`{name}`, {protocol.name}"
        if right[""] is None:
            lines.append([title, "", "refused", "", "", ""])
            continue
        if name in SEARCHED and protocol == QUERY_AWARE:
            searched.append(right)
        rivals = [it for it, one in right.items() if it not in ("", FIRST) and it[0] != "-" and one is not None]
        best = max(rivals, key=lambda method: right[method].mean())
        lines.append([title, right[""].shape[1], *compared([right], best), percent([right], FIRST)])
        taken = [right[f"-{part}"] for part in without]
        parts.append([title, *("refused" if one is None else points([(right[""], one)]) for one in taken)])
    if searched:
        best = max(overall, key=lambda method: np.mean([right[method].mean() for right in searched]))
        lines.append(["mean of those searched", "", *compared(searched, best), percent(searched, FIRST)])
    header = ["task", "questions", "recipe", "best published", "difference", FIRST]
    of_parts = table(["task", *without], parts, names=1)
    return f"{table(header, lines, names=1)}\nWhat each part brings:\n\n{of_parts}"


def confirm(out: Path, recipe: Recipe) -> str:
    """Markdown: the recipe, and the first search's, beside the best published method, on questions of `CONFIRMED` that
    no half had."""
    asked = Asked({name: questions for name, (questions, _) in CONFIRMED.items()}, 2, out)
    lines = []
    for name, (_, rivals) in CONFIRMED.items():
        recipes = {"": recipe} | {method: {"method": method} for method in (*rivals, FIRST)}
        asked.compute([name], list(recipes.values()))
        right = {title: asked.right(name, one) for title, one in recipes.items()}
        best = max(rivals, key=lambda method: right[method].mean())
        first = percent([right], FIRST), points([(right[FIRST], right[best])])
        lines.append([f"`{name}`", right[""].shape[1], *compared([right], best), *first])
    header = ["task", "new questions", "recipe", "best published", "difference", FIRST, "difference"]
    return table(header, lines, names=1)


def compared(tasks: list[dict[str, np.ndarray]], best: str) -> list[str]:
    """The recipe, the best published method, and the difference, as cells of a row."""
    apart = points([(right[""], right[best]) for right in tasks])
    return [percent(tasks, ""), f"{best} {percent(tasks, best)}", apart]


def percent(tasks: list[dict[str, np.ndarray]], name: str) -> str:
    """The mean over tasks; nothing where one of them refuses it."""
    found = [right[name] for right in tasks]
    return "" if any(one is None for one in found) else f"{100 * np.mean([one.mean() for one in found]):.1f}"


def points(pairs: list[tuple[np.ndarray, np.ndarray]]) -> str:
    """A `difference` as it stands in a table."""
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*difference(pairs))


def main(argv: list[str]) -> None:
    parser = new_parser("own_method", __doc__)
    parser.add_argument("step", choices=["search", "held-out", "confirm"])
    parser.add_argument("--scorers", type=whole(1), default=6, help="best published methods whose scores are tried (6)")
    parser.add_argument("--processes", type=whole(), default=2, help="over which tasks are spread (2)")
    parser.add_argument("--out", type=path, default=RESULTS, help="folder")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    from . import own_scores  # noqa: F401 (registers a method, which is no business of who imports this file)

    steps = given.out / "own_method_search.json"
    if given.step == "search":
        best = [name for name, _ in best_published(SEARCHED, given.out)][: given.scorers]
        asked = Asked(SEARCHED, 0, given.out, SEARCHING, given.processes)
        schedules = Asked({LONG_ANSWERS: SEARCHED[LONG_ANSWERS]}, 0, given.out, BUDGETS)
        search(asked, schedules, best[0], [*best, OWN_SCORES], steps)
        return
    recipe = json.loads(steps.read_text(encoding="utf-8"))["recipe"]
    if given.step == "held-out":
        text, name = held_out(given.out, recipe, given.processes), "own_method.md"
    else:
        text, name = confirm(given.out, recipe), "own_method_confirm.md"
    write_text(given.out / name, text)
    print(text)


if __name__ == "__main__":
    start(main)
