"""Search for a method of our own by recombining the parts of published ones.

    python -m benchmarks.own_method search       # on one half of the questions of every regime
    python -m benchmarks.own_method held-out     # the recipe that it found, on the other half and on another model
    python -m benchmarks.own_method confirm      # new questions, where the held-out ones were too few to tell

The search starts from the published method with the best mean over the tasks. It then changes one part at a time: the
scores and whether they are calibrated, the window and the pooling, how heads and layers share the budget, what happens
to evicted entries, and how often a long answer is compressed. The best change of a part is taken if its 95 % interval
against the current recipe is above zero. Every step and the recipe are written to `<out>/own_method_search.json`.

`held-out` runs the recipe, the recipe without each of its parts, and the published methods that were best on the first
half, on questions that the search never used. `confirm` runs the recipe and the best of these again. Answers are
stored, so an interrupted run resumes. All steps start from the tables of benchmarks/method_table.py.
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

from .driver import RESULTS, new_parser, points, publish, start
from .method_cells import Answers, Cell, Column, Protocol, Task, cells_of, compute, resampled
from .method_table import RULERS
from .method_tasks import QUERY_AWARE, RULER, TASKS

# Task -> number of questions in both halves; the slowest tasks first.
SEARCHED = {"smollm2_ruler": 20, "smollm2": 40, "tiny_read_all": 40, "tiny_needle": 40, "tiny_video": 40}
SEARCHED |= {"tiny_multi_image": 40, "tiny": 100}
HELD_OUT = {"smollm2_ruler": 20, "smollm2": 120, "tiny_read_all": 80, "tiny_needle": 40, "tiny_video": 80}
HELD_OUT |= {"tiny_multi_image": 100, "tiny": 200, "gemma3_ruler": 40}
# Where the recipe leads on the held-out half, but within its interval: task -> number of all questions, of which those
# in neither half are asked, and the published methods that were best on the held-out half, close to each other.
CONFIRMED = {"smollm2_ruler": (60, ["r-kv", "leverage"]), "smollm2": (220, ["r-kv"])}
CONFIRMED |= {"tiny_video": (280, ["r-kv", "adakv", "lava"]), "tiny_multi_image": (300, ["adakv", "lava"])}
# Tasks without a table -> the task whose best methods are used there, and further methods that were best there.
RIVALS_OF = {"smollm2_ruler": ("smollm2", ["leverage"]), "gemma3_ruler": ("smollm2", ["leverage"])}
SEARCHING = Protocol("search", QUERY_AWARE.options, tuple(map(Column.of, (0.2, 0.05))))
BUDGETS = Protocol(
    "decode budgets",
    {"first_token": "compressed"},
    tuple(Column(f"{budget}", None, {"budget": budget, "decode_budget": budget}) for budget in (96, 48)),
)
NEVER_SEEN = "gemma3_ruler"
WHOLE_FIRST = Protocol("first token from the whole cache", {"scope": "prompt"})  # all that sliding windows support
LONG_ANSWERS = "tiny_read_all"  # the task on which the schedule is searched and held out, under BUDGETS
INTERVAL = 8  # decode steps between two evictions, unless a recipe sets it
COMPETITORS = 3  # number of best published methods of a task, on the searched half
FIRST = "adamixkv"  # the result of the first search, which is not published
OWN_SCORES = "attention-and-leverage"  # from own_scores.py
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
    # One of each kind, only if it stays within the budget (a search would prefer any other), and only if it lost less
    # than ten points over the bundled tasks in the first search.
    "layer_budget": ("pyramid-effivlm", "global", "cake", "lava"),
    "merge": ("cam", "pivot"),
    "decode_interval": (1, 4, 16, 32),
}
FORK = multiprocessing.get_context("fork")  # child processes inherit the models
Recipe = dict[str, object]  # "method", "calibrated", and options of it


def half(task: Task, number: int) -> Task:
    """Return every second batch of a task, from batch `number` (0 or 1) on; if their number is odd, the last is left
    out. Raises ValueError if there are fewer than two."""
    size = task.batch_size
    if task.questions < 2 * size:
        raise ValueError(f"{task.name}: {task.questions} questions are fewer than two batches of {size}")
    return _part(task, task.questions // (2 * size) * size, lambda start: 2 * start + number * size)


def later(task: Task, first: int) -> Task:
    """Return a task's questions from `first` on."""
    return _part(task, task.questions - first, lambda start: first + start)


def _part(task: Task, questions: int, place: Callable[[int], int]) -> Task:
    """Return some batches of a task; `place`: first question of a batch -> its index in the task."""

    def of_whole(batch: slice) -> slice:
        start = place(batch.start)
        return slice(start, start + batch.stop - batch.start)

    return replace(
        task,
        questions=questions,
        inputs=lambda batch: task.inputs(of_whole(batch)),
        right=lambda batch, new: task.right(of_whole(batch), new),
    )


class Halves:
    """One half of several tasks, and the answers of recipes to it, computed on demand.

    `questions`: task -> number of questions in both halves; `number`: the half, 0 or 1, or 2 for the questions after
    both; `processes`: how many processes share the tasks.
    """

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
        """Compute the missing answers of tasks, with one prefill for all recipes."""
        for name in names:
            cells = [cell for recipe in recipes for cell in self._cells(name, recipe)]
            compute(self.tasks[name], cells, self.answers(name), self.prompts)

    def right(self, name: str, recipe: Recipe) -> np.ndarray | None:
        """Return a recipe's scores (columns, questions) on a task, 0 to 1; None if the library refuses it."""
        self.compute([name], [recipe])
        cells, answers = self._cells(name, recipe), self.answers(name)
        if not cells or any(cell.key in answers.refused for cell in cells):
            return None
        return np.stack([answers.of(cell, self.tasks[name].questions) for cell in cells])

    def _cells(self, name: str, recipe: Recipe) -> list[Cell]:
        """Return the cells of the table of methods with the recipe's options; empty for a calibrated recipe on a model
        without calibration."""
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
        """Return each recipe's scores on every task; None if a task refuses it."""
        if self.pools:
            names = list(self.tasks)
            parts = [names[number :: len(self.pools)] for number in range(len(self.pools))]
            for done in [pool.submit(_compute, part, recipes) for pool, part in zip(self.pools, parts, strict=True)]:
                done.result()
        found = [[self.right(name, recipe) for name in self.tasks] for recipe in recipes]
        return [None if any(one is None for one in right) else right for right in found]


_halves: Halves | None = None  # in a process of a pool


def _forked(asked: Halves) -> ProcessPoolExecutor:
    """Start a process that inherits the tasks' models and keeps their prefills throughout the search."""

    def begin() -> None:
        global _halves
        _halves = asked
        torch.set_num_threads(1)  # a forked process lacks its parent's threads

    return ProcessPoolExecutor(1, FORK, begin)


def _compute(names: list[str], recipes: list[Recipe]) -> None:
    _halves.compute(names, recipes)


def published(name: str, out: Path, number: int, questions: int) -> dict[str, np.ndarray]:
    """Return method -> scores (ratios, questions) on one half, from the method table: the questions that `random`
    answered, and the methods that answered all of them."""
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
    """Return the KV methods that answered the searched half of each task, best first, with their means over tasks and
    ratios in percent. Token methods are left out: their ratio counts only vision tokens, not text."""
    tables = [published(name, out, 0, SEARCHED[name]) for name in names if name in TASKS]
    shared = set.intersection(*map(set, tables)) - {*RULERS, FIRST}
    shared = {name for name in shared if issubclass(method_info(name).cls, KVCluster)}
    means = {name: 100 * float(np.mean([table[name].mean() for table in tables])) for name in shared}
    return sorted(means.items(), key=lambda item: -item[1])


def changes(recipe: Recipe, part: str, scorers: list[str]) -> Iterator[Recipe]:
    """Yield the recipe with every other value of one part, if its method has that part."""
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
    """Drop the options that the recipe's scores do not take."""
    takes = {"method", "calibrated", *all_options(method_info(str(recipe["method"])), recipe.get("scorer"))}
    return {name: value for name, value in recipe.items() if name in takes}


def search(asked: Halves, schedules: Halves, start: str, scorers: list[str], file: Path) -> Recipe:
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
    """Return the mean over tasks and columns in percent; None if a task refuses the recipe."""
    return None if right is None else 100 * float(np.mean([one.mean() for one in right]))


def difference(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float, float]:
    """Return ours - theirs in points, averaged over tasks, with its 95 % bootstrap interval. Each pair holds one task's
    scores, both (ratios, questions); each task's questions are resampled separately."""
    return resampled([100 * (ours - theirs).mean(0) for ours, theirs in pairs])


def ablations(recipe: Recipe) -> dict[str, Recipe]:
    """Return part -> the recipe with its method's default for this part, for parts that differ from the default."""
    cls = method_info(str(recipe["method"])).cls
    changed = [part for part in recipe if part != "method" and recipe[part] != getattr(cls, part, None)]
    return {part: without_unknown({name: value for name, value in recipe.items() if name != part}) for part in changed}


def regimes() -> list[tuple[str, Protocol]]:
    """Return what is held out: each task, and long answers a second time, under a decode budget."""
    asked = [(name, WHOLE_FIRST if name == NEVER_SEEN else QUERY_AWARE) for name in HELD_OUT]
    return asked + [(name, BUDGETS) for name in HELD_OUT if name == LONG_ANSWERS]


def rivals_of(name: str, out: Path, overall: list[str]) -> list[str]:
    """Return the published methods that were best on the searched half: of the task, and overall (`overall`)."""
    table, more = RIVALS_OF.get(name, (name, []))
    there = [method for method, _ in best_published([table], out)[:COMPETITORS]]
    return list(dict.fromkeys([*there, *overall, *more]))


def answer_held_out(out: Path, recipe: Recipe, overall: list[str], regime: tuple[str, Protocol]) -> dict[str, object]:
    """Return the scores in one regime of the recipe (under ""), its rivals, the first search's method, and the recipe
    without each part (under a dash and its name); None if the library refuses one."""
    name, protocol = regime
    asked = Halves({name: HELD_OUT[name]}, 1, out, protocol)
    # Evicting less often means holding more in between, so all have the recipe's schedule.
    schedule = {option: recipe[option] for option in ("decode_interval",) if option in recipe}
    recipes: dict[str, Recipe] = {"": recipe}
    recipes |= {method: {"method": method, **schedule} for method in [*rivals_of(name, out, overall), FIRST]}
    recipes |= {f"-{part}": one for part, one in ablations(recipe).items()}
    asked.compute([name], list(recipes.values()))
    return {title: asked.right(name, one) for title, one in recipes.items()}


def held_out(out: Path, recipe: Recipe, processes: int = 0) -> str:
    """Return Markdown with the recipe beside the best published method, on each task and on average over the searched
    ones, and the gain of each of its parts."""
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
        parts.append([title, *("refused" if one is None else points(*difference([(right[""], one)])) for one in taken)])
    if searched:
        best = max(overall, key=lambda method: np.mean([right[method].mean() for right in searched]))
        lines.append(["mean of those searched", "", *compared(searched, best), percent(searched, FIRST)])
    header = ["task", "questions", "recipe", "best published", "difference", FIRST]
    of_parts = table(["task", *without], parts, names=1)
    return f"{table(header, lines, names=1)}\nWhat each part brings:\n\n{of_parts}"


def confirm(out: Path, recipe: Recipe) -> str:
    """Markdown: the recipe, and the first search's, beside the best published method, on questions of `CONFIRMED` that
    no half had."""
    asked = Halves({name: questions for name, (questions, _) in CONFIRMED.items()}, 2, out)
    lines = []
    for name, (_, rivals) in CONFIRMED.items():
        recipes = {"": recipe} | {method: {"method": method} for method in (*rivals, FIRST)}
        asked.compute([name], list(recipes.values()))
        right = {title: asked.right(name, one) for title, one in recipes.items()}
        best = max(rivals, key=lambda method: right[method].mean())
        first = percent([right], FIRST), points(*difference([(right[FIRST], right[best])]))
        lines.append([f"`{name}`", right[""].shape[1], *compared([right], best), *first])
    header = ["task", "new questions", "recipe", "best published", "difference", FIRST, "difference"]
    return table(header, lines, names=1)


def compared(tasks: list[dict[str, np.ndarray]], best: str) -> list[str]:
    """The recipe, the best published method, and the difference, as cells of a row."""
    apart = points(*difference([(right[""], right[best]) for right in tasks]))
    return [percent(tasks, ""), f"{best} {percent(tasks, best)}", apart]


def percent(tasks: list[dict[str, np.ndarray]], name: str) -> str:
    """Format the mean over tasks; empty if one of them refuses it."""
    found = [right[name] for right in tasks]
    return "" if any(one is None for one in found) else f"{100 * np.mean([one.mean() for one in found]):.1f}"


def main(argv: list[str]) -> None:
    parser = new_parser("own_method", __doc__)
    parser.add_argument("step", choices=["search", "held-out", "confirm"])
    parser.add_argument("--scorers", type=whole(1), default=6, help="best published methods whose scores are tried (6)")
    parser.add_argument("--processes", type=whole(), default=2, help="over which tasks are spread (2)")
    parser.add_argument("--out", type=path, default=RESULTS, help="folder")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    from . import own_scores  # noqa: F401 (registers a method, which importing this file should not do)

    steps = given.out / "own_method_search.json"
    if given.step == "search":
        best = [name for name, _ in best_published(SEARCHED, given.out)][: given.scorers]
        asked = Halves(SEARCHED, 0, given.out, SEARCHING, given.processes)
        schedules = Halves({LONG_ANSWERS: SEARCHED[LONG_ANSWERS]}, 0, given.out, BUDGETS)
        search(asked, schedules, best[0], [*best, OWN_SCORES], steps)
        return
    recipe = json.loads(steps.read_text(encoding="utf-8"))["recipe"]
    if given.step == "held-out":
        text, name = held_out(given.out, recipe, given.processes), "own_method.md"
    else:
        text, name = confirm(given.out, recipe), "own_method_confirm.md"
    publish(given.out / name, text)


if __name__ == "__main__":
    start(main)
