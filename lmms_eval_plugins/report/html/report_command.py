"""`python -m kvcompress report`: tables, files with all numbers, and one HTML page of results on disk."""

import argparse

from kvcompress.files import check_output

from ...cells.command_line import Parser
from ...cells.errors import exit_code
from ...cells.flag_types import folder, path
from .data import page_data
from .groups import load_groups
from .page import write_page
from .tables import write_tables


def parser() -> argparse.ArgumentParser:
    this = Parser(prog="python -m kvcompress report", description=__doc__)
    this.add_argument("results", type=folder, help="results, results/<task> or results/<task>/<model>")
    this.add_argument("--out", type=path, metavar="DIR", help="where to write (default: `report` in that folder)")
    return this


def main(arguments: list[str]) -> int:
    """The exit code; every error ends with one line on stderr."""
    return exit_code(report, arguments, "files")


def report(arguments: list[str]) -> None:
    """Write the report. Raises UsageError, or KVCompressError where there are no results."""
    given = parser().parse_args(arguments)
    out, page = given.out or given.results / "report", "report.html"
    check_output(out, page)
    groups = load_groups(given.results)
    files = write_tables(groups, out)
    write_page(out / page, "KV-cache compression", page_data(groups))
    for file in [*files, out / page]:
        print(f"written: {file} ({file.stat().st_size / 1e3:.0f} kB)")
