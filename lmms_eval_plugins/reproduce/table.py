"""Write the table of our results beside the paper's."""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvcompress import KVCompressError
from kvcompress.files import write_text

from ..cells.errors import UsageError
from ..cells.results import RESULTS_FILE, changed_since, read_results
from ..report.headline import headline
from ..report.numbers import fixed, near, share
from ..report.short_answers import EXPLANATION, too_short
from ..report.table import markdown_table
from .config import REFERENCE_COLUMNS, Reference, Reproduction
from .plan import PlannedCell

SUFFIXES = (".md", ".csv")  # of the table's files
UNKNOWN = ("data", "tasks")  # parts of a fingerprint that are known only once a task's data is loaded
CONFIDENCE = 1.96  # standard errors on either side: 95 %
SHORT = "short answers"
COLUMNS = ["method", "ratio", "ours", "theirs", "difference", "tokens/correct", "inside both errors", "note"]


@dataclass(frozen=True)
class Row:
    """A row of the table, in the paper's scale; missing numbers are None.

    Attributes:
        margin: half the width of our 95 % interval.
        inside: whether the difference is at most the margin plus the reading error; None if that is unknown, or the
            result is of an earlier run.
        tokens_per_correct: tokens of our answers over the sum of their scores.
        short: whether most of our answers are too short to show compression.
        note: why there is no result; or the number of questions, the share kept if it is not the requested ratio, and
            what changed since it was measured.
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
    tokens_per_correct: float | None
    short: bool
    note: str


def row(
    cell: PlannedCell,
    reference: Reference,
    reason: str,
    failed: str | None = None,
    asked_now: dict[str, Any] | None = None,
) -> Row:
    """Return a cell's row with its reference. If it has no result, the note says how its run `failed`, or else the
    `reason`; if its result has another fingerprint than is `asked_now`, where they differ."""
    theirs, reading_error = reference.get(cell.key, (None, None))
    ours, stderr, margin, tokens, short, note = None, None, None, None, False, failed or reason
    is_earlier = bool(failed)
    if cell.folder is not None and (cell.folder / RESULTS_FILE).is_file():
        try:
            results = read_results(cell.folder)
            ours, stderr, questions, tokens = score(cell, results)
        except KVCompressError as error:  # damaged, or without a score
            note = str(error)
        else:
            margin, note = interval(stderr, questions, cell.benchmark.scale), f"{questions} questions"
            short = too_short(results)
            note += _other_share(results) + f", {SHORT}" * short
            stored = results.get("fingerprint")
            if asked_now and isinstance(stored, dict) and (changed := changed_since(stored, asked_now, UNKNOWN)):
                note += f", {changed}"
                is_earlier = True
            note += f"; perhaps of an earlier run, as this one {failed}" if failed else ""
    difference = None if ours is None or theirs is None else ours - theirs
    inside = None
    if not is_earlier and None not in (difference, margin, reading_error):
        inside = abs(difference) <= margin + reading_error
    return Row(*cell.key, ours, stderr, margin, theirs, reading_error, difference, inside, tokens, short, note)


def score(cell: PlannedCell, results: dict[str, Any]) -> tuple[float, float | None, int, float | None]:
    """Return our score and standard error in the paper's scale, the number of questions, and tokens/correct."""
    scores, scale = results["results"].get(cell.benchmark.task, {}), cell.benchmark.scale
    found = headline(results, cell.benchmark.metric)
    if found is None:
        wanted = cell.benchmark.metric or "a number"
        raise KVCompressError(
            f"{cell.folder}: the task's scores have no {wanted}: {', '.join(scores) or 'none at all'}"
        )
    stderr = None if found.stderr is None else scale * found.stderr
    questions = results.get("n_questions", results["n_samples"])
    return scale * found.score, stderr, questions, found.tokens_per_correct


def _other_share(results: dict[str, Any]) -> str:
    """Return the share kept, as text, if it is not the requested ratio."""
    realised = results["efficiency"].get("realised_ratio", {}).get("mean")
    return "" if near(realised, results["protocol"]["ratio"]) else f", kept {share(realised)}"


def interval(stderr: float | None, questions: int, scale: float) -> float | None:
    """Return half the width of the 95 % interval: 1.96 standard errors.

    If all questions have the same score, the standard error is 0 and says nothing. The result is then the largest share
    of other scores of which a sample of this size would contain none with probability 5 %.
    """
    if stderr is None:
        return None
    return CONFIDENCE * stderr if stderr > 0 else scale * (1 - 0.05 ** (1 / questions))


def write_report(config: Reproduction, rows: list[Row], stem: Path) -> list[Path]:
    """Write the table as Markdown and CSV, each file atomically."""
    files = [stem.with_name(stem.name + suffix) for suffix in SUFFIXES]
    frame = pd.DataFrame([dataclasses.asdict(row) for row in rows]).assign(source=config.source or "")
    write_text(files[0], markdown(config, rows))
    write_text(files[1], frame.to_csv(index=False, lineterminator="\n"))
    return files


def markdown(config: Reproduction, rows: list[Row]) -> str:
    """Return the table in Markdown, with a section for each model and benchmark."""
    done = [row for row in rows if row.ours is not None]
    judged = [row for row in done if row.inside is not None]
    theirs = f"**Theirs: {config.source}.**" if config.source else "There is no reference, only our results."
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
        alignment = ["---", *["---:"] * 5, "---", "---"]
        lines += [markdown_table([*COLUMNS], [_shown_row(row) for row in part], alignment), *_trend(part)]
        lines += [f"{SHORT.capitalize()}: the median answer has 1 or 2 tokens. {EXPLANATION}", ""] * any(
            row.short for row in part
        )
    return "\n".join(lines).rstrip() + "\n"


def _shown_row(row: Row) -> list[str]:
    def number(value: float | None, error: float | None = None) -> str:
        return "-" if value is None else fixed(value, 1) + ("" if error is None else f" ± {fixed(error, 1)}")

    ours = "missing" if row.ours is None else number(row.ours, row.stderr)
    difference = (
        "-" if row.difference is None else f"{'-' if row.difference < 0 else '+'}{fixed(abs(row.difference), 1)}"
    )
    inside = {None: "-", True: "yes", False: "no"}[row.inside]
    theirs, tokens = number(row.theirs, row.reading_error), number(row.tokens_per_correct)
    return [row.method, row.ratio, ours, theirs, difference, tokens, inside, row.note]


def _trend(rows: list[Row]) -> list[str]:
    both = pd.DataFrame([(row.ours, row.theirs) for row in rows if row.difference is not None], columns=["a", "b"])
    ranks = both.rank()
    if len(both) < 3 or (ranks.nunique() < 2).any():
        return []
    return [f"Rank correlation of ours and theirs over {len(both)} cells: {ranks['a'].corr(ranks['b']):.2f}.", ""]


def write_reference(rows: list[Row], path: Path) -> None:
    """Write our results as a reference, with half the 95 % interval as reading error. Raises UsageError without any."""
    done = [row for row in rows if row.margin is not None]
    if not done:
        raise UsageError(f"--write-reference {path}: there is no result to write")
    values = [
        (row.model, row.method, row.ratio, row.benchmark, round(row.ours, 4), round(row.margin, 4)) for row in done
    ]
    write_text(path, pd.DataFrame(values, columns=REFERENCE_COLUMNS).to_csv(index=False, lineterminator="\n"))
