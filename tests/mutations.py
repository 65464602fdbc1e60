"""Faults that the tests must notice: `python -m tests.mutate` puts each into a copy of the code and runs the tests.

They stand in `tests/named_faults/`, a file per folder of the code. A file to break, with what should notice (files
below `tests/`, or tests of them, or `authors [CASE]`: the recording of the authors' code of that `<fixture> <label>`),
and below it each fault with a name, what goes wrong, a snippet that stands in the file once, and what takes its place:

    kvcompress/kernels/compact.py | kvcompress/kernels/test_kernels.py
    | kvcompress/clusters/test_clusters.py
    compact-one-head: every KV head stores the columns that the first one keeps
    - indices[row, head].clamp(min=0)
    + indices[row, 0].clamp(min=0)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("named_faults")
AUTHORS = "oracle/authors/test_authors.py::"
AUTHORS += "test_ours_keeps_what_the_authors_code_keeps_but_for_named_differences"


@dataclass(frozen=True)
class Mutation:
    """A snippet of the code, broken.

    Attributes:
        path: of the file, below the repository.
        old, new: a snippet that stands in the file once, and what takes its place.
        breaks: what goes wrong, in a few words.
        tests: the files, or tests of them, that should notice.
    """

    path: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        return self.path.rpartition("/")[0]


def read(file: Path) -> list[tuple[str, Mutation]]:
    """The faults of one file, each with its name."""
    entries: list[tuple[str, list[str], str, str, list[str], list[str]]] = []
    path, tests = "", []
    for line in file.read_text(encoding="utf-8").splitlines():
        start, text = line[:2], line[2:]
        if start == "- ":
            entries[-1][4].append(text)
        elif start == "+ ":
            entries[-1][5].append(text)
        elif start == "| ":
            tests += text.split(" | ")
        elif ": " in line:
            name, _, breaks = line.partition(": ")
            entries.append((name, tests, path, breaks, [], []))
        else:
            path, *tests = line.split(" | ")
    return [
        (name, Mutation(path, "\n".join(old), "\n".join(new), breaks, tuple(map(test_of, tests))))
        for name, tests, path, breaks, old, new in entries
    ]


def test_of(written: str) -> str:
    """The path of a test as pytest wants it."""
    return "tests/" + (AUTHORS + written.removeprefix("authors ") if written.startswith("authors ") else written)


FAULTS = [fault for file in sorted(FOLDER.glob("*.txt")) for fault in read(file)]
MUTATIONS = dict(FAULTS)
