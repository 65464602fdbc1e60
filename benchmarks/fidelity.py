"""How much of what the authors' code keeps ours keeps too, on real states: SmolLM2-135M-Instruct's, or the bundled
model's for methods that tell images from text.

    python -m benchmarks.fidelity

Compares ours with the recordings in tests/oracle/authors/fixtures/ and writes the table into docs/differences.md. The
recordings are made again by the script of each repository, which `tests/oracle/authors/` explains.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from lmms_eval_plugins.cells.results import write_text
from tests.oracle.authors import recording as recordings
from tests.oracle.authors.ours import of, share
from tests.oracle.authors.recording import Recording
from tests.oracle.authors.states import DECODED, RATIOS, states

STATES = ("smollm2", "tiny")  # the first that a method was recorded on
PAGE = Path(__file__).parent.parent / "docs" / "differences.md"
BEGIN, END = "<!-- fidelity: made by benchmarks/fidelity.py -->\n", "<!-- end of fidelity -->"


@dataclass(frozen=True)
class Row:
    """A method and its authors' repository; `shares`: (decode steps, ratio) -> the share of common entries."""

    label: str
    states: str
    repository: str
    commit: str
    shares: dict[tuple[int, float], float]
    differs: tuple[str, ...]  # what is named as different


def rows() -> Iterator[Row]:
    """Of each fixture the labels that have recordings of the whole prompt."""
    for fixture in recordings.fixtures():
        about, named = recordings.about(fixture), import_module(f"tests.oracle.authors.{fixture}").DIFFERENCES
        of_label: dict[str, list[Recording]] = {}
        for one in recordings.load(fixture):
            if one.states in STATES and ratio_of(one):
                of_label.setdefault(one.label, []).append(one)
        for label, ones in of_label.items():
            on = min((one.states for one in ones), key=STATES.index)
            ones = [one for one in ones if one.states == on]
            shares = {(one.decoded, ratio_of(one)): share(one, of(one)) for one in ones}
            starts = [start for start in named if any(one.name.startswith(start) for one in ones)]
            differs = tuple(dict.fromkeys(named[start][1] for start in starts))
            yield Row(label, on, about["repository"], about["commit"], shares, differs)


def ratio_of(one: Recording) -> float | None:
    """Which of `RATIOS` it asks for; None for another budget, or a part of the prompt."""
    prompt = states(one.states).prompt
    return {round(ratio * prompt): ratio for ratio in RATIOS}.get(one.budget) if one.prompt == prompt else None


def markdown(found: list[Row]) -> str:
    ratios = " | ".join(f"{ratio:g}" for ratio in RATIOS)
    lines = [f"| method | authors' code | states | {ratios} | {ratios} |", "|---|---|---|" + "---:|" * 2 * len(RATIOS)]
    notes: list[str] = []
    for row in sorted(found, key=lambda row: (row.label, row.repository)):
        name = row.repository.removeprefix("https://github.com/")
        cells = [percent(row.shares.get((steps, ratio))) for steps in (0, DECODED) for ratio in RATIOS]
        marks = ""
        for note in row.differs:
            if note not in notes:
                notes.append(note)
            marks += f"<sup>{notes.index(note) + 1}</sup>"
        source = f"[{name}]({row.repository}/tree/{row.commit}) {row.commit[:7]}"
        lines.append(f"| {row.label}{marks} | {source} | {row.states} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n" + "".join(f"{n}. {note}\n" for n, note in enumerate(notes, 1))


def percent(share: float | None) -> str:
    """Rounded down, so that 100 is said of nothing else."""
    return "" if share is None else f"{int(1000 * share) / 10:g}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    table = markdown(list(rows()))
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    write_text(PAGE, f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")
    print(table)


if __name__ == "__main__":
    main()
