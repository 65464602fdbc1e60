"""The command behind `scripts/reproduce.sh`: a paper's grid, run here, in a table beside the paper's numbers.

    python -m lmms_eval_plugins.reproduce NAME [--limit N] [--only model=...,task=...,method=...,ratio=...] [...]

NAME is a file of `configs/reproduce` or a path. Every cell is run by `lmms_eval_plugins.evaluate`, in a process per
model, task and set of options, so that complete cells are skipped and a failure stops nothing else.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from kvcompress import KVCompressError
from kvcompress.methods import method_info
from kvcompress.policy.options import all_options
from kvcompress.policy.policy import make_policy

from . import evaluate
from .cells import machine
from .cells.command_line import Parser, Request, parse
from .cells.errors import EvaluationFailed, UsageError, fail, nearest
from .cells.plan import Plan
from .cells.results import RESULTS_FILE, write_text
from .model.arguments import ModelArguments
from .report import headline_metric

CONFIGS = Path(__file__).parents[1] / "configs" / "reproduce"
CONFIDENCE = 1.96  # standard errors on either side: 95 %


# -- the file


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Strict):
    name: str = Field(description="As in the paper and in the reference.")
    pretrained: str | None = Field(description="MODEL of run_eval.sh; null where there is none to run.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Model arguments, e.g. max_pixels.")
    gpu: bool = Field(True, description="Not run where there is no GPU, unless device= is given.")
    needs: str | None = Field(None, description="Why `pretrained` is null.")

    @model_validator(mode="after")
    def _check(self) -> "Model":
        return _with_reason(self, self.pretrained, "pretrained")


class Benchmark(_Strict):
    name: str = Field(description="As in the paper and in the reference.")
    task: str | None = Field(description="A task of lmms-eval; null where it cannot be run here.")
    metric: str | None = Field(None, description="The task's metric; its first number where null.")
    scale: PositiveFloat = Field(100, description="The paper's score for a score of 1.")
    needs: str | None = Field(None, description="Why `task` is null.")
    remark: str | None = Field(None, description="What differs from the paper.")

    @model_validator(mode="after")
    def _check(self) -> "Benchmark":
        return _with_reason(self, self.task, "task")


class Method(_Strict):
    name: str = Field(description="As in the paper and in the reference.")
    method: str = Field(description="A method of kvcompress.list_methods().")
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the method.")
    models: list[str] | None = Field(None, description="The models it is run on; all where null.")


class Reproduction(_Strict):
    """A file of `configs/reproduce`."""

    title: str
    paper: str = Field(description="Its address.")
    about: str = Field(description="What is reproduced, and what is not.")
    reference: str | None = Field(None, description="CSV beside the file; see docs/reproduce.md for its columns.")
    source: str | None = Field(None, description="Where the reference is from; stands wherever it is shown.")
    models: list[Model] = Field(min_length=1)
    benchmarks: list[Benchmark] = Field(min_length=1)
    methods: list[Method] = Field(min_length=1)
    ratios: list[float] = Field(default_factory=list)
    budgets: list[int] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check(self) -> "Reproduction":
        if bool(self.ratios) == bool(self.budgets):
            raise ValueError("give either ratios or budgets")
        if (self.reference is None) != (self.source is None):
            raise ValueError("reference and source belong together")
        for kind in ("models", "benchmarks"):
            names = [entry.name for entry in getattr(self, kind)]
            if len(names) != len(set(names)):
                raise ValueError(f"a name stands twice among {kind}: {', '.join(names)}")
        names = [model.name for model in self.models]
        for method in self.methods:
            for size in self.sizes(method):
                make_policy(method.method, **size, **method.options)
            for name in method.models or []:
                if name not in names:
                    raise ValueError(f"method {method.name}: no model {name!r}{nearest(name, names)}")
        for model in self.models:
            own = [method.name for method in self.methods if method.models is None or model.name in method.models]
            if len(own) != len(set(own)):
                raise ValueError(f"a method stands twice for {model.name}: {', '.join(own)}")
        return self

    def sizes(self, method: Method) -> list[dict[str, Any]]:
        """The ratios or budgets that a method is run at; the full cache has one."""
        if method_info(method.method).name == "full":
            return [{"ratio": 1.0}]
        return [{"ratio": ratio} for ratio in self.ratios] + [{"budget": budget} for budget in self.budgets]


def _with_reason(entry: Any, value: str | None, name: str) -> Any:
    if (value is None) != (entry.needs is not None):
        raise ValueError(f"{entry.name}: `needs` says why {name} is null, and stands only there")
    return entry


def load_config(name: str, model_root: Path | None = None) -> tuple[Reproduction, Path]:
    """The reproduction, and the file it is in. A model ORG/NAME is taken from the folder NAME of `model_root`, if it is
    there. Raises UsageError with one line for anything wrong in the file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else CONFIGS / f"{name}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
        hint = nearest(name, known) if path.parent == CONFIGS else ""
        raise UsageError(f"no reproduction {name!r}{hint}; there are: {', '.join(known)}, or a path that ends in .yaml")
    try:
        config = Reproduction.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {where + ': ' if where else ''}{first['msg']}") from None
    if model_root is None:
        return config, path
    models = [
        model.model_copy(update={"pretrained": str(local)})
        if model.pretrained and (local := model_root / Path(model.pretrained).name).is_dir()
        else model
        for model in config.models
    ]
    return config.model_copy(update={"models": models}), path


REFERENCE_COLUMNS = ["model", "method", "ratio_kept", "benchmark", "value", "est_error_abs"]


def load_reference(config: Reproduction, path: Path) -> dict[tuple[str, ...], tuple[float, float]]:
    """(model, benchmark, method, ratio or budget as text) -> the paper's value and its reading error.

    Raises UsageError where the file or a column is missing, or a row names what the configuration does not have.
    """
    if config.reference is None:
        return {}
    file = path.parent / config.reference
    if not file.is_file():
        raise UsageError(f"{path}: the reference {str(file)!r} is not there")
    frame = pd.read_csv(file)
    if missing := [column for column in REFERENCE_COLUMNS if column not in frame]:
        raise UsageError(f"{file}: no column {', '.join(missing)}; it needs {', '.join(REFERENCE_COLUMNS)}")
    for column, entries in (("model", config.models), ("benchmark", config.benchmarks), ("method", config.methods)):
        names = [entry.name for entry in entries]
        if unknown := sorted(set(frame[column]) - set(names)):
            raise UsageError(f"{file}: {column} {unknown[0]!r} is not in {path.name}, which has {', '.join(names)}")
    return {
        (row.model, row.benchmark, row.method, f"{row.ratio_kept:g}"): (row.value, row.est_error_abs)
        for row in frame.itertuples()
    }


# -- the cells


@dataclass(frozen=True)
class Planned:
    """A cell of the paper's grid.

    Attributes:
        size: {"ratio": 0.2} or {"budget": 64}.
        folder: where its results are or will be; None where it cannot be run at all.
    """

    model: Model
    benchmark: Benchmark
    method: Method
    size: dict[str, Any]
    folder: Path | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.model.name, self.benchmark.name, self.method.name, f"{next(iter(self.size.values())):g}"


@dataclass(frozen=True)
class Run:
    """Cells that one call of `lmms_eval_plugins.evaluate` computes, and its arguments, also as that reads them."""

    cells: list[Planned]
    argv: list[str]
    request: Request
    arguments: ModelArguments


def plan(config: Reproduction, only: dict[str, set[str]], extra: list[str]) -> tuple[list[Planned], list[Run]]:
    """Every cell asked for, in the order of the file, and the runs for those that can be run.

    Raises UsageError or KVCompressError for arguments that `run_eval.sh` does not take.
    """
    cells, runs = [], []
    for model, benchmark in itertools.product(config.models, config.benchmarks):
        own = [
            Planned(model, benchmark, method, size)
            for method in config.methods
            if method.models is None or model.name in method.models
            for size in config.sizes(method)
        ]
        own = [cell for cell in own if all(_names(cell, part) & values for part, values in only.items())]
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


def _names(cell: Planned, part: str) -> set[str]:
    """What `--only` may call a part of a cell, in lower case."""
    names = {
        "model": [cell.model.name, cell.model.pretrained],
        "task": [cell.benchmark.name, cell.benchmark.task],
        "method": [cell.method.name, cell.method.method],
        "ratio": [cell.key[3]],
    }[part]
    return {name.lower() for name in names if name}


def _groups(cells: list[Planned]) -> list[list[Planned]]:
    """Cells of one model and task in as few calls as can be: an option goes to every method that has it."""
    groups: list[tuple[dict[str, Any], list[Planned]]] = []
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


def _options_of(cell: Planned, options: dict[str, Any]) -> dict[str, Any]:
    valid = all_options(method_info(cell.method.method), options.get("scorer"))
    return {name: value for name, value in options.items() if name in valid}


def _run(cells: list[Planned], extra: list[str]) -> Run:
    model, task = cells[0].model, cells[0].benchmark.task
    options = {name: value for cell in cells for name, value in cell.method.options.items()}
    methods = dict.fromkeys(method_info(cell.method.method).name for cell in cells)
    compressed = [cell.size for cell in cells if method_info(cell.method.method).name != "full"] or [{"ratio": 1.0}]
    ratios = dict.fromkeys(f"{size['ratio']:g}" for size in compressed if "ratio" in size)
    budgets = dict.fromkeys(str(size["budget"]) for size in compressed if "budget" in size)
    given = {**model.arguments, **options}
    if budgets:
        given["budget"] = ",".join(budgets)
    argv = [task, model.pretrained, ",".join(methods), ",".join(ratios) or "-"]
    argv += [*(f"{name}={value}" for name, value in given.items()), *extra]
    request = parse(argv)
    asked = Plan.of(request)
    found = {(cell.method, cell.ratio, cell.budget): cell.folder(request.flags.output_path) for cell, _ in asked.cells}
    placed = [
        dataclasses.replace(
            cell,
            folder=found[method_info(cell.method.method).name, cell.size.get("ratio"), cell.size.get("budget")],
        )
        for cell in cells
    ]
    return Run(placed, argv, request, asked.arguments)


def parse_only(text: str, config: Reproduction) -> dict[str, set[str]]:
    """`task=TextVQA,task=ChartQA,ratio=0.1` -> {"task": {"textvqa", "chartqa"}, "ratio": {"0.1"}}.

    Raises UsageError for a part or a value that the configuration does not have.
    """
    parts = {"model": config.models, "task": config.benchmarks, "method": config.methods}
    every = [
        Planned(model, benchmark, method, size)
        for model, benchmark, method in itertools.product(*parts.values())
        for size in config.sizes(method)
    ]
    only: dict[str, set[str]] = {}
    for item in filter(None, text.split(",")):
        part, _, value = item.partition("=")
        if part not in (*parts, "ratio"):
            raise UsageError(f"--only {item!r}: give model=, task=, method= or ratio= with a value")
        value = f"{float(value):g}" if part == "ratio" and value.replace(".", "", 1).isdigit() else value.lower()
        valid = dict.fromkeys(cell.key[3] if part == "ratio" else _shown(cell, part) for cell in every)
        if not any(value in _names(cell, part) for cell in every):
            raise UsageError(f"--only {item}: there is no such {part}; there are: {', '.join(valid)}")
        only.setdefault(part, set()).add(value)
    return only


def _shown(cell: Planned, part: str) -> str:
    return {"model": cell.model, "task": cell.benchmark, "method": cell.method}[part].name


# -- running


def cannot_run(cell: Planned, run: Run | None) -> str | None:
    """Why a cell is not even tried; None where it is."""
    if run is None:
        return f"needs {cell.benchmark.needs or cell.model.needs}"
    if cell.model.gpu and run.arguments.device is None and not torch.cuda.is_available():
        return "needs a GPU, and torch sees none (device=cpu tries without)"
    if machine.needs_hub(run.request) and not _hub_is_there():
        try:
            machine.check_model_is_local(run.arguments)
        except EvaluationFailed:
            name = run.arguments.pretrained
            return (
                f"needs the model {name}: `hf download {name} --local-dir DIR/{Path(name).name}`, then --model-root DIR"
            )
    return None


@functools.cache
def _hub_is_there() -> bool:
    return not machine.is_offline() and machine.hub_is_reachable()


def execute(argv: Sequence[str]) -> tuple[int, str]:
    """Run `lmms_eval_plugins.evaluate` in a process of its own: its exit code, and its error line if it has one."""
    process = subprocess.Popen([sys.executable, "-m", evaluate.__name__, *argv], stderr=subprocess.PIPE)
    tail = b""
    try:
        while chunk := os.read(process.stderr.fileno(), 65536):
            os.write(2, chunk)
            tail = (tail + chunk)[-8192:]
        code = process.wait()
    except KeyboardInterrupt:  # which the process got, too: it tidies up
        process.wait()
        raise
    lines = [line for line in tail.decode(errors="replace").splitlines() if line.startswith("error: ")]
    return code, lines[-1].removeprefix("error: ") if lines else f"exit code {code}"


# -- the table


@dataclass(frozen=True)
class Row:
    """A line of the table; None where there is no such number. All in the paper's scale.

    Attributes:
        margin: half of our 95 % interval.
        inside: whether the difference is at most margin and reading error together.
        note: why there is no result, or the number of questions.
    """

    model: str
    benchmark: str
    method: str
    ratio: str
    ours: float | None
    stderr: float | None
    margin: float | None
    theirs: float | None
    reading_error: float | None
    difference: float | None
    inside: bool | None
    note: str


def row(cell: Planned, reference: dict[tuple[str, ...], tuple[float, float]], reason: str) -> Row:
    """A cell beside its reference; `reason` stands where it has no result."""
    theirs, reading_error = reference.get(cell.key, (None, None))
    ours, stderr, margin, note = None, None, None, reason
    if cell.folder is not None and (cell.folder / RESULTS_FILE).is_file():
        ours, stderr, questions = read_score(cell)
        margin, note = interval(stderr, questions, cell.benchmark.scale), f"{questions} questions"
    difference = None if ours is None or theirs is None else ours - theirs
    inside = None
    if difference is not None and margin is not None:
        inside = abs(difference) <= margin + reading_error
    return Row(*cell.key, ours, stderr, margin, theirs, reading_error, difference, inside, note)


def interval(stderr: float | None, questions: int, scale: float) -> float | None:
    """Half of the 95 % interval: 1.96 standard errors; or, where all questions got the same score, so that the standard
    error says nothing, the largest share of other scores that would show none so often as once in 20 draws."""
    if stderr is None:
        return None
    return CONFIDENCE * stderr if stderr > 0 else scale * (1 - 0.05 ** (1 / questions))


def read_score(cell: Planned) -> tuple[float, float | None, int]:
    """Our score and standard error in the paper's scale, and the number of questions."""
    results = json.loads((cell.folder / RESULTS_FILE).read_text(encoding="utf-8"))
    scores, scale = results["results"].get(cell.benchmark.task, {}), cell.benchmark.scale
    metric = headline_metric(results)
    if cell.benchmark.metric is not None:
        metric = next((key for key in scores if key.split(",")[0] == cell.benchmark.metric), None)
    if metric is None or not isinstance(scores[metric], int | float):
        wanted = cell.benchmark.metric or "a number"
        raise KVCompressError(
            f"{cell.folder}: the task's scores have no {wanted}: {', '.join(scores) or 'none at all'}"
        )
    name, _, answer_filter = metric.partition(",")
    stderr = scores.get(f"{name}_stderr,{answer_filter}")
    stderr = scale * stderr if isinstance(stderr, int | float) else None
    return scale * scores[metric], stderr, results["n_samples"]


COLUMNS = ["method", "ratio", "ours", "theirs", "difference", "inside both errors", "note"]


def markdown(config: Reproduction, rows: list[Row]) -> str:
    """The table, a part for each model and benchmark."""
    done = [row for row in rows if row.ours is not None]
    judged = [row for row in done if row.inside is not None]
    theirs = f"**Theirs: {config.source}.**" if config.source else "There is no reference: ours alone."
    lines = [f"# {config.title}", "", config.paper, "", config.about.strip(), ""]
    inside = f"{sum(row.inside for row in judged)} of {len(judged)} inside both errors"
    lines += [
        f"{len(rows)} cells, {len(done)} with a result; {inside}. Ours ± standard error; theirs ± reading error; "
        f"inside: the difference is at most half of our 95 % interval and the reading error. {theirs}",
        "",
    ]
    remarks = {benchmark.name: benchmark.remark for benchmark in config.benchmarks}
    for (model, benchmark), part in itertools.groupby(rows, key=lambda row: (row.model, row.benchmark)):
        part = list(part)
        lines += [f"## {model}, {benchmark}", ""]
        lines += [remarks[benchmark], ""] if remarks[benchmark] else []
        lines += [f"| {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * 4 + " --- | --- |"]
        lines += [f"| {' | '.join(_shown_row(row))} |" for row in part]
        lines += ["", *_trend(part)]
    return "\n".join(lines).rstrip() + "\n"


def _shown_row(row: Row) -> list[str]:
    def number(value: float | None, error: float | None = None) -> str:
        return "-" if value is None else f"{value:.1f}" + ("" if error is None else f" ± {error:.1f}")

    ours = "missing" if row.ours is None else number(row.ours, row.stderr)
    difference = "-" if row.difference is None else f"{row.difference:+.1f}"
    inside = {None: "-", True: "yes", False: "no"}[row.inside]
    return [row.method, row.ratio, ours, number(row.theirs, row.reading_error), difference, inside, row.note]


def _trend(rows: list[Row]) -> list[str]:
    both = pd.DataFrame([(row.ours, row.theirs) for row in rows if row.difference is not None], columns=["a", "b"])
    ranks = both.rank()
    if len(both) < 3 or (ranks.nunique() < 2).any():
        return []
    return [f"Rank correlation of ours and theirs over {len(both)} cells: {ranks['a'].corr(ranks['b']):.2f}.", ""]


def write_report(config: Reproduction, rows: list[Row], stem: Path) -> list[Path]:
    """Write the table as Markdown and CSV; each file whole or not at all."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(stem.name + suffix) for suffix in (".md", ".csv")]
    frame = pd.DataFrame([dataclasses.asdict(row) for row in rows]).assign(source=config.source or "")
    write_text(files[0], markdown(config, rows))
    write_text(files[1], frame.to_csv(index=False, lineterminator="\n"))
    return files


def write_reference(rows: list[Row], path: Path) -> None:
    """Our results as a reference: the reading error is half of the 95 % interval. Raises UsageError without any."""
    done = [row for row in rows if row.margin is not None]
    if not done:
        raise UsageError(f"--write-reference {path}: there is no result to write")
    values = [
        (row.model, row.method, row.ratio, row.benchmark, round(row.ours, 4), round(row.margin, 4)) for row in done
    ]
    write_text(path, pd.DataFrame(values, columns=REFERENCE_COLUMNS).to_csv(index=False, lineterminator="\n"))


# -- the command


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="reproduce.sh",
        allow_abbrev=False,
        description="Run a paper's grid and write a table of ours against theirs. What is not listed below (flags and "
        "key=value) goes to run_eval.sh.",
    )
    add = parser.add_argument
    add("name", help="a file of configs/reproduce (effivlm_bench, vl_cache, look_m, snapkv, tiny), or a path")
    add("--limit", metavar="N", help="questions per task")
    add(
        "--only", default="", metavar="PART=VALUE,...", help="model=, task=, method=, ratio=; several of one are either"
    )
    add("--output_path", type=Path, default=Path("results"), metavar="DIR", help="root of the results (results)")
    add("--model-root", type=Path, metavar="DIR", help="models downloaded by hand: DIR/NAME for ORG/NAME")
    add("--report-only", action="store_true", help="the table of what is on disk; run nothing")
    add("--dry-run", action="store_true", help="list cells and commands; run and write nothing")
    add("--write-reference", type=Path, metavar="CSV", help="write our results as a reference")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 where every cell that lmms-eval has has a result, 1 where one failed or this machine has no GPU
    or model for it, 2 for bad input, 130 after Ctrl-C. The table is written in all cases but bad input."""
    try:
        return reproduce(sys.argv[1:] if argv is None else argv)
    except (UsageError, KVCompressError) as error:
        return fail(error, 2)


def reproduce(argv: list[str]) -> int:
    flags, extra = parser().parse_known_args(argv)
    config, path = load_config(flags.name, flags.model_root)
    reference = load_reference(config, path)
    extra += ["--output_path", str(flags.output_path)] + (["--limit", flags.limit] if flags.limit else [])
    cells, runs = plan(config, parse_only(flags.only, config), extra)
    if not cells:
        raise UsageError(f"--only {flags.only}: no cell has all of that")
    run_of = {cell.key: run for run in runs for cell in run.cells}
    reasons = {cell.key: cannot_run(cell, run_of.get(cell.key)) for cell in cells}
    if flags.dry_run:
        print("\n".join(listing(cells, runs, reasons)))
        return 0

    code = 0
    if not flags.report_only:
        possible = [run for run in runs if reasons[run.cells[0].key] is None]
        code, failed = run_all(possible)
        code, reasons = code or int(len(possible) < len(runs)), reasons | failed
    rows = [row(cell, reference, reasons[cell.key] or "not run") for cell in cells]
    stem = flags.output_path / "-".join(["reproduce", path.stem, *([f"limit={flags.limit}"] if flags.limit else [])])
    for file in write_report(config, rows, stem):
        print(f"written: {file}")
    if flags.write_reference:
        write_reference(rows, flags.write_reference)
        print(f"written: {flags.write_reference}")
    print(f"{sum(row.ours is not None for row in rows)} of {len(rows)} cells have a result")
    return code


def run_all(runs: list[Run]) -> tuple[int, dict[tuple[str, ...], str]]:
    """Run one after the other: the exit code, and why cells have no result."""
    failed: dict[tuple[str, ...], str] = {}
    for number, run in enumerate(runs, 1):
        print(f"[{number} of {len(runs)}] {run.cells[0].model.name}, {run.cells[0].benchmark.name}: ", end="")
        print(shlex.join(["run_eval.sh", *run.argv]), flush=True)
        try:
            code, error = execute(run.argv)
        except KeyboardInterrupt:
            code, error = 130, ""
        if code == 130:
            fail("interrupted; finished cells are kept, the same command goes on from there", 130)
            return 130, failed
        if code:
            failed |= {cell.key: f"failed: {error}" for cell in run.cells}
    return int(bool(failed)), failed


def listing(cells: list[Planned], runs: list[Run], reasons: dict[tuple[str, ...], str | None]) -> Iterator[str]:
    """The lines of `--dry-run`."""
    for cell in cells:
        on_disk = cell.folder is not None and (cell.folder / RESULTS_FILE).is_file()
        state = "on disk" if on_disk else reasons[cell.key] or "to run"
        yield f"{', '.join(cell.key)}: {state}"
    for run in runs:
        if reasons[run.cells[0].key] is None:
            yield shlex.join(["./scripts/run_eval.sh", *run.argv])


if __name__ == "__main__":
    sys.exit(main())
