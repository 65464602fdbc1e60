"""What the benchmarks of this folder share: parsers, and `Run`, which measures and saves cells one by one."""

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kvcompress.bench.flags import add_flags
from kvcompress.bench.results import Results, about, check_files, page, say, settle
from kvcompress.command_line import Parser, exit_code
from kvcompress.files import write_text
from kvcompress.flag_types import path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path("benchmarks/results")
RESULTS = Path(__file__).parent / "results"  # in any working directory
IMAGES = Path(__file__).parent.parent / "docs" / "images"


def new_parser(name: str, doc: str, *flags: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return the parser of `python -m benchmarks.NAME`, whose docstring is `doc`; flags and defaults as in
    `add_flags`."""
    this = Parser(prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0])
    add_flags(this, *flags, **defaults)
    return this


def speed_parser(name: str, doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return the parser of a speed benchmark, which runs on the CPU in fp32 by default."""
    where = {"device": "cpu", "dtype": "float32", "out": FOLDER / name}
    return new_parser(name, doc, "--threads", "--clock", "--resume", **where, **defaults)


def tasks_parser(name: str, doc: str, tasks: Iterable[str], *flags: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that answers questions of tasks and keeps the answers (method_cells.py)."""
    this = new_parser(name, doc, *flags)
    this.add_argument("tasks", nargs="*", choices=[[], *tasks], help="default: all")
    this.add_argument("--tables-only", action="store_true", help="of the answers that are there")
    this.add_argument("--out", type=path, default=RESULTS, help="folder")
    return this


def save(figure: "Figure", file: Path, dpi: int = 130) -> None:
    """Write a figure, creating its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=dpi)


def wrapped(text: str, indent: str = "") -> str:
    """Wrap a paragraph of Markdown; `indent`: before each line but the first."""
    return textwrap.fill(text, 118, subsequent_indent=indent, break_on_hyphens=False)


def points(difference: float, low: float, high: float, digits: int = 1) -> str:
    """Format a difference in points with its interval."""
    return f"{difference:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def page_of_answers(words: list[str], title: str, *parts: str) -> str:
    """Return the page of a benchmark of answers, which are computed on the CPU; `words`: its name and arguments."""
    return page(about([f"benchmarks.{words[0]}", *words[1:]], {}, torch.device("cpu")), title, *parts)


def publish(file: Path, text: str) -> None:
    """Write a page, and print it."""
    write_text(file, text)
    print(text)


def put(page_file: Path, benchmark: str, name: str, text: str) -> None:
    """Replace the text between a page's two marks of that name, and print it."""
    begin, end = f"<!-- {name}: made by benchmarks/{benchmark}.py -->\n", f"<!-- end of {name} -->"
    before, rest = page_file.read_text(encoding="utf-8").split(begin)
    write_text(page_file, f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
    print(text)


def start(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a benchmark and end the process; every error ends with one line on stderr."""
    sys.exit(exit_code(main))


class Run:
    """A call of a benchmark, and its results file.

    Attributes:
        given: the parsed flags.
        device: the device to run on.
    """

    def __init__(self, parser: argparse.ArgumentParser, argv: list[str], grid: tuple[str, ...] = ()):
        """`grid` names the flags that select cells; a resumed run may change these."""
        self.given = given = parser.parse_args(argv)
        declared = vars(given).keys() - {"out", "resume", *grid}
        check_files(given.out, ".json", ".md")
        self.device = settle(given)
        words = [parser.prog.removeprefix("python -m "), *argv]
        head = about(words, {name: getattr(given, name) for name in sorted(declared)}, self.device)
        resume = getattr(given, "resume", False)
        self._results = Results(given.out.with_suffix(".json"), head, resume, parts=("records",))

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far."""
        return self._results.content["records"]

    def measure(self, cells: Iterable[dict[str, Any]], measured: Callable[..., Iterable[dict[str, Any]]]) -> None:
        """Add the records of each cell that has none.

        `measured` takes a cell's fields and returns its records, which contain these fields."""
        for cell in cells:
            if not self._results.has("records", **cell):
                say(", ".join(f"{name} {value}" for name, value in cell.items()) or "measuring")
                for record in list(measured(**cell)):
                    self._results.add("records", record)

    def report(self, title: str, *parts: str) -> None:
        """Write the page next to the file, and print it."""
        self._results.report(page(self._results.content, title, *parts))
