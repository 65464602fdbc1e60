"""`kvcompress report`: write tables, files with all numbers, and one HTML page of results on disk.

For the .json of `kvcompress speech`, it writes a page beside it that plays the answers.
"""

import argparse
import os
from pathlib import Path

from kvcompress.command_line import Parser, returns_exit_code
from kvcompress.files import check_output
from kvcompress.flag_types import folder, path


def parser() -> argparse.ArgumentParser:
    this = Parser("report", description=__doc__)
    this.add_argument(
        "results",
        type=folder_or_speech,
        help="results, results/<task> or results/<task>/<model>; or the .json of a speech run",
    )
    this.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="where to write (default: `report` in that folder; for a speech run, the folder of the .json)",
    )
    return this


def folder_or_speech(text: str) -> Path:
    """Accept a folder, as `folder` does, or a .json file."""
    is_file = text.endswith(".json") and os.path.isfile(text)
    return path(text).resolve() if is_file else folder(text)


@returns_exit_code("files")
def main(arguments: list[str]) -> None:
    """Write the report."""
    given = parser().parse_args(arguments)
    if given.results.suffix == ".json" and given.results.is_file():
        return speech_report(given.results, given.out or given.results.parent)
    from ..groups import load_groups
    from .data import page_data
    from .page import write_page
    from .tables import write_tables

    out, page = given.out or given.results / "report", "report.html"
    check_output(out, page)
    groups = load_groups(given.results)
    files = write_tables(groups, out)
    write_page(out / page, "KV-cache compression", page_data(groups))
    for file in [*files, out / page]:
        print(f"written: {file} ({file.stat().st_size / 1e3:.0f} kB)")


def speech_report(results: Path, out: Path) -> None:
    """Write the page of a speech run."""
    from .page import write_page
    from .speech import speech_data

    page = out / results.with_suffix(".html").name
    check_output(out, page.name)
    write_page(page, "Answers aloud", speech_data(results), name="speech")
    print(f"written: {page} ({page.stat().st_size / 1e3:.0f} kB)")
