"""Turn a configuration into the cells of the paper's grid and the runs that compute them."""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cells.errors import UsageError
from ..cells.plan import Plan
from ..cells.results import Cell, exact
from ..evaluate import parse
from ..model.input_methods import method_info, method_options, size_of
from .config import Benchmark, PaperMethod, PaperModel, Reproduction


@dataclass(frozen=True)
class PlannedCell:
    """A cell of the paper's grid.

    Attributes:
        size: {"ratio": 0.2} or {"budget": 64}.
        asked: the evaluation's cell, and all options of its method; None if it cannot be run at all.
        folder: where its results are or will be; None if `asked` is None.
    """

    model: PaperModel
    benchmark: Benchmark
    method: PaperMethod
    size: dict[str, Any]
    asked: tuple[Cell, dict[str, Any]] | None = None
    folder: Path | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.model.name, self.benchmark.name, self.method.name, exact(next(iter(self.size.values())))


@dataclass(frozen=True)
class Run:
    """One call of `lmms_eval_plugins.evaluate`.

    Attributes:
        cells: the cells it computes.
        argv: its arguments.
        plan: what these ask for.
    """

    cells: list[PlannedCell]
    argv: list[str]
    plan: Plan

    @property
    def asks_lm_eval(self) -> bool:
        """Whether its task belongs to lm-evaluation-harness."""
        return any(map(self.plan.is_text, self.plan.request.tasks))


def parse_only(text: str, config: Reproduction) -> dict[str, set[str]]:
    """Parse `task=TextVQA,task=ChartQA,ratio=0.1` into {"task": {"textvqa", "chartqa"}, "ratio": {"0.1"}}.

    Raises UsageError for an axis or a value that the configuration does not have.
    """
    axes = {"model": config.models, "task": config.benchmarks, "method": config.methods}
    every = [
        PlannedCell(model, benchmark, method, size)
        for model, benchmark, method in itertools.product(*axes.values())
        for size in config.sizes(method)
    ]
    only: dict[str, set[str]] = {}
    items = [item for item in text.split(",") if item.strip()]
    if text and not items:
        raise UsageError(f"--only {text!r} is an empty list")
    for item in items:
        axis, _, value = item.partition("=")
        if axis not in (*axes, "ratio"):
            raise UsageError(f"--only {item!r}: give model=, task=, method= or ratio= with a value")
        value = exact(float(value)) if axis == "ratio" and value.replace(".", "", 1).isdecimal() else value.lower()
        valid = dict.fromkeys(cell.key[[*axes, "ratio"].index(axis)] for cell in every)
        if not any(value in _names(cell, axis) for cell in every):
            raise UsageError(f"--only {item}: there is no such {axis}; valid: {', '.join(valid)}")
        only.setdefault(axis, set()).add(value)
    return only


def plan(config: Reproduction, only: dict[str, set[str]], extra: list[str]) -> tuple[list[PlannedCell], list[Run]]:
    """Return all requested cells, in the order of the file, and the runs that compute those that can be run.

    Raises UsageError or KVCompressError for arguments that `run_eval.sh` does not take.
    """
    cells, runs = [], []
    for model, benchmark in itertools.product(config.models, config.benchmarks):
        own = [
            PlannedCell(model, benchmark, method, size)
            for method in config.methods
            if method.models is None or model.name in method.models
            for size in config.sizes(method)
        ]
        own = [cell for cell in own if all(_names(cell, axis) & values for axis, values in only.items())]
        if model.pretrained is None or benchmark.task is None:
            cells += own
            continue
        placed = {}
        for group in _groups(own):
            run = _run(group, extra)
            runs.append(run)
            placed |= {cell.key: cell for cell in run.cells}
        cells += [placed[cell.key] for cell in own]
    return cells, runs


def _names(cell: PlannedCell, axis: str) -> set[str]:
    """Return the names of a cell that `--only` accepts on one axis of the grid, in lower case."""
    names = {
        "model": [cell.model.name, cell.model.pretrained],
        "task": [cell.benchmark.name, cell.benchmark.task],
        "method": [cell.method.name, cell.method.method],
        "ratio": [cell.key[3]],
    }[axis]
    return {name.lower() for name in names if name}


def _groups(cells: list[PlannedCell]) -> list[list[PlannedCell]]:
    """Group the cells of one model and task into as few calls as possible. In a call, an option applies to every method
    that has it."""
    groups: list[tuple[dict[str, Any], list[PlannedCell]]] = []
    for cell in cells:
        for options, members in groups:
            union = options | cell.method.options
            if all(_options_of(member, union) == member.method.options for member in [*members, cell]):
                options |= cell.method.options
                members.append(cell)
                break
        else:
            groups.append((dict(cell.method.options), [cell]))
    return [members for _, members in groups]


def _options_of(cell: PlannedCell, options: dict[str, Any]) -> dict[str, Any]:
    valid = method_options(cell.method.method, options.get("scorer"))
    return {name: value for name, value in options.items() if name in valid}


def _run(cells: list[PlannedCell], extra: list[str]) -> Run:
    """Return the call for these cells, setting the folder of each."""
    model, task = cells[0].model, cells[0].benchmark.task
    options = {name: value for cell in cells for name, value in cell.method.options.items()}
    methods = dict.fromkeys(method_info(cell.method.method).name for cell in cells)
    compressed = [cell.size for cell in cells if not size_of(cell.method.method)] or [{"ratio": 1.0}]
    ratios = dict.fromkeys(exact(size["ratio"]) for size in compressed if "ratio" in size)
    budgets = dict.fromkeys(str(size["budget"]) for size in compressed if "budget" in size)
    given = {**model.arguments, **options}
    if budgets:
        given["budget"] = ",".join(budgets)
    argv = [task, model.pretrained, ",".join(methods), ",".join(ratios) or "-"]
    argv += [*(f"{name}={value}" for name, value in given.items()), *cells[0].benchmark.flags, *extra]
    request = parse(argv)
    asked = Plan.of(request)
    found = {(own.method, own.ratio, own.budget): (own, options) for own, options in asked.cells}
    if len(found) < len(asked.cells):
        raise UsageError(
            f"reproduce places one cell per method and size in its table, not {len(asked.cells)}: an option with "
            "several values, such as seed=0..9, is for kvcompress eval"
        )
    placed = []
    for cell in cells:
        own = found[method_info(cell.method.method).name, cell.size.get("ratio"), cell.size.get("budget")]
        placed.append(dataclasses.replace(cell, asked=own, folder=own[0].folder(request.flags.output_path)))
    return Run(placed, argv, asked)
