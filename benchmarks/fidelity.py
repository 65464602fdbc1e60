"""Measure how many of the entries that the authors' code keeps ours keeps too, on real states: SmolLM2-135M-Instruct's,
or the bundled model's for methods that distinguish images from text.

    python -m benchmarks.fidelity

This compares ours with the recordings in tests/oracle/authors/fixtures/ and writes a table into
benchmarks/results/fidelity.md, followed by one for methods that drop tokens. Each repository's script in
`tests/oracle/authors/` makes its recordings. A last table shows what a method's variants change: the kept entries, and
the bundled model's answers, which are saved as they come in benchmarks/results/variants.json.
"""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import get_args

import torch

import kvcompress
from kvcompress.bench.timing import table
from kvcompress.files import write_text
from kvcompress.tokens import TokenMethod
from tests.oracle.authors import recording as recordings
from tests.oracle.authors import token_recording
from tests.oracle.authors.ours import of, ours, share
from tests.oracle.authors.recording import Recording
from tests.oracle.authors.states import DECODED, RATIOS, ratio_of, states
from tests.oracle.authors.token_recording import TokenRecording

from . import method_cells, method_tasks
from .driver import RESULTS, new_parser, start

STATES = ("smollm2", "smollm2_image", "tiny")  # the first of these that a method was recorded on is used
PAGE = RESULTS / "fidelity.md"
TOKENS = """Methods that drop vision tokens: the share of the states that the authors' code lets through and ours lets
through too, in percent, the least of drawn prompts at these budgets (vision tokens, as `budget=` counts them)."""
VARIANT_RATIOS = (0.5, 0.2)


@dataclass(frozen=True)
class Row:
    """A method and its authors' repository; `shares`: (decode steps, ratio) -> the share of common entries; `held`:
    ratio -> the ratio that their code actually keeps of a prompt."""

    label: str
    states: str
    repository: str
    commit: str
    shares: dict[tuple[int, float], float]
    differs: tuple[str, ...]  # the documented differences
    held: dict[float, float]


@dataclass(frozen=True)
class TokenRow:
    """A method that drops tokens; `budgets`: of its recordings; `share`: their smallest share of common states."""

    label: str
    repository: str
    commit: str
    budgets: tuple[int, ...]
    share: float


def rows() -> Iterator[Row]:
    """Yield a row for each label of a fixture with recordings at the table's ratios and steps."""
    for fixture in recordings.fixtures():
        about, named = recordings.about(fixture), import_module(f"tests.oracle.authors.{fixture}").DIFFERENCES
        of_label: dict[str, list[Recording]] = {}
        for one in recordings.load(fixture):
            if one.states in STATES and one.decoded in (0, DECODED) and ratio_in_table(one):
                of_label.setdefault(one.label, []).append(one)
        for label, ones in of_label.items():
            on = min((one.states for one in ones), key=STATES.index)
            ones = [one for one in ones if one.states == on]
            shares = {(one.decoded, ratio_in_table(one)): share(one, of(one)) for one in ones}
            starts = [start for start in named if any(one.name.startswith(start) for one in ones)]
            differs = tuple(dict.fromkeys(named[start][1] for start in starts))
            held = {one.ratio: one.budget / one.prompt for one in ones if one.ratio}
            yield Row(label, on, about["repository"], about["commit"], shares, differs, held)


def token_rows() -> Iterator[TokenRow]:
    for path in sorted(token_recording.FIXTURES.glob("*.npz")):
        about = recordings.about(f"tokens/{path.stem}")
        script = import_module(f"tests.oracle.authors.{path.stem}")
        of_label: dict[str, list[TokenRecording]] = {}
        for one in token_recording.load(path.stem):
            of_label.setdefault(one.label, []).append(one)
        for label, ones in of_label.items():
            shares = [
                token_recording.share(theirs, states)
                for one in ones
                for theirs, states in zip(one.states, script.ours(one), strict=True)
            ]
            budgets = tuple(one.budget for one in ones)
            yield TokenRow(label, about["repository"], about["commit"], budgets, min(shares))


def ratio_in_table(one: Recording) -> float | None:
    return ratio_of(one.states, one.prompt, one.budget) if one.ratio is None else one.ratio


def names(found: Sequence[Row | TokenRow]) -> dict[tuple[str, str], str]:
    """Return (repository, commit) -> a unique name for its link."""
    sources = dict.fromkeys((row.repository, row.commit) for row in found)
    counts = Counter(repository.rpartition("/")[2] for repository, _ in sources)
    named = {}
    for repository, commit in sources:
        name = repository.rpartition("/")[2]
        named[repository, commit] = name if counts[name] == 1 else f"{name} {commit[:7]}"
    return named


def markdown(found: list[Row], dropping: list[TokenRow]) -> str:
    ratios = " | ".join(f"{ratio:g}" for ratio in RATIOS)
    lines = [f"| method | authors' code | states | {ratios} | {ratios} |", "|---|---|---|" + "---:|" * 2 * len(RATIOS)]
    notes: list[str] = []
    linked = names([*found, *dropping])
    for row in sorted(found, key=lambda row: (row.label, row.repository)):
        cells = [cell(row, ratio) for ratio in RATIOS]
        cells += [percent(row.shares.get((DECODED, ratio))) for ratio in RATIOS]
        notes += [note for note in row.differs if note not in notes]
        marks = ", ".join(str(notes.index(note) + 1) for note in row.differs)
        label = f"{row.label} <sup>{marks}</sup>" if marks else row.label
        name = linked[row.repository, row.commit]
        lines.append(f"| {label} | [{name}] | {row.states} |{'|'.join(cells)}|")  # no spaces: some labels are long
    said = [wrapped(f"{number}. {note}") for number, note in enumerate(notes, 1)]
    links = [f"[{name}]: {repository}/tree/{commit}" for (repository, commit), name in linked.items()]
    blocks = ["\n".join(lines), "\n".join(said)]
    blocks += [TOKENS, tokens_table(dropping, linked)] if dropping else []
    return "\n\n".join(filter(None, [*blocks, "\n".join(links)])) + "\n"


def tokens_table(found: list[TokenRow], linked: dict[tuple[str, str], str]) -> str:
    lines = []
    for row in sorted(found, key=lambda row: row.label):
        budgets = ", ".join(map(str, row.budgets))
        lines.append([row.label, f"[{linked[row.repository, row.commit]}]", budgets, percent(row.share)])
    return table(["method", "authors' code", "budgets", "the same"], lines, names=3).rstrip()


def cell(row: Row, ratio: float) -> str:
    """Format a share after the prompt, with the ratio held if it is not the column's."""
    held = f"{row.held.get(ratio, ratio):.2f}"
    return percent(row.shares.get((0, ratio))) + ("" if held == f"{ratio:.2f}" else f" ({held})")


def wrapped(note: str) -> str:
    return textwrap.fill(note, 118, subsequent_indent="   ", break_on_hyphens=False)


def percent(share: float | None) -> str:
    """Format a share in percent, rounded down, so that only 1 is shown as 100."""
    return "" if share is None else f"{int(1000 * share) / 10:g}"


# -- variants


def variants() -> dict[str, list[str]]:
    """Return method -> its variants, the default first, for methods that have several."""
    found = {}
    for name, info in kvcompress.list_methods().items():
        for option in fields(info.cls):
            if option.name == "variant":
                others = [one for one in get_args(option.type) if one != option.default]
                found[name] = [option.default, *others]
    return found


def variants_table(questions: int, answers: Path) -> str:
    """Tabulate each variant's accuracy on the bundled model, and its kept entries in common with the default."""
    task = method_tasks.tiny(questions)
    kept = method_cells.Answers(answers, task.identity)
    cells = {}
    for method, names in variants().items():
        window = method_cells.cells_of(task, [method])[0].options
        for name, ratio in product(names, VARIANT_RATIOS):
            options = {**window, "variant": name}
            cells[method, name, ratio] = method_cells.Cell(
                task.protocols[0], method, method_cells.Column.of(ratio), options
            )
    method_cells.compute(task, list(cells.values()), kept)
    wide = [f"{what} at {ratio:g}" for what in ("accuracy", "kept") for ratio in VARIANT_RATIOS]
    lines = []
    for method, names in variants().items():
        for name in names:
            right = [kept.of(cells[method, name, ratio], questions) for ratio in VARIANT_RATIOS]
            shares = ["" if name == names[0] else percent(in_common(method, name, r)) for r in VARIANT_RATIOS]
            accuracies = [f"{100 * one.mean():.0f}" if len(one) else "refused" for one in right]
            lines.append([method, f"`{name}`", *accuracies, *shares])
    return table(["method", "variant", *wide], lines, names=2)


def in_common(method: str, variant: str, ratio: float) -> float | None:
    """Return the share of kept entries that a variant has in common with the default, on the bundled model's states;
    None for a method that drops tokens before they are cached."""
    if issubclass(kvcompress.list_methods()[method].cls, TokenMethod):
        return None
    given = states("tiny")
    one, other = (
        ours(given, given.prompt, 0, method, 0, ratio=ratio, **options).kept for options in ({"variant": variant}, {})
    )
    return float((one & other).sum() / max(one.sum(), other.sum()))


# -- the page


def put(name: str, table: str) -> None:
    """Replace the text between the page's two marks of that name."""
    begin, end = f"<!-- {name}: made by benchmarks/fidelity.py -->\n", f"<!-- end of {name} -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    write_text(PAGE, f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}")
    print(table)


def main(argv: list[str]) -> None:
    parser = new_parser("fidelity", __doc__, "--questions")
    parser.add_argument("tables", nargs="*", choices=[[], "fidelity", "variants"], help="default: both")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    wanted = given.tables or ["fidelity", "variants"]
    if "fidelity" in wanted:
        put("fidelity", markdown(list(rows()), list(token_rows())))
    if "variants" in wanted:
        put("variants", variants_table(given.questions, RESULTS / "variants.json"))


if __name__ == "__main__":
    start(main)
