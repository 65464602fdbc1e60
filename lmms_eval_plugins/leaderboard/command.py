"""`kvcompress leaderboard`: write a static page with the results of many models and tasks.

kvcompress leaderboard FOLDER...            writes leaderboard.html
kvcompress leaderboard --check FOLDER...    checks that each is complete and plausible
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from kvcompress.command_line import Parser, returns_exit_code
from kvcompress.files import check_output
from kvcompress.flag_types import path

from ..cells.errors import EvaluationFailed
from ..cells.results import result_folders
from .submissions import name_of, submission, unpacked

TEMPLATES = Path(__file__).parent / "templates"


def parser() -> argparse.ArgumentParser:
    this = Parser(
        "leaderboard",
        description="Write a static page with the results of many models and tasks, or --check submissions.",
    )
    add = this.add_argument
    add(
        "folders",
        nargs="+",
        type=submission,
        metavar="FOLDER",
        help="a submission: a results folder, or a tar archive of one",
    )
    add("--check", action="store_true", help="list the problems of each submission; exit code 2 if there are any")
    add("--out", type=path, metavar="FILE", default=Path("leaderboard.html"), help="the page (leaderboard.html)")
    return this


@returns_exit_code("files")
def main(arguments: list[str]) -> int:
    """Check the submissions or write the page; return 2 if a submission has problems."""
    given = parser().parse_args(arguments)
    folders = list(dict.fromkeys(given.folders))
    return check(folders) if given.check else write(folders, given.out)


def check(folders: list[Path]) -> int:
    """Print the problems, one per line; return 2 if there are any, else 0."""
    from .checks import problems

    count = 0
    for each in folders:
        with unpacked(each) as folder:
            found = problems(folder)
        for problem in found:
            print(f"{name_of(each)}: {problem}", file=sys.stderr)
        if not found:
            print(f"{name_of(each)}: complete and plausible")
        count += len(found)
    return 2 if count else 0


def write(folders: list[Path], out: Path) -> int:
    """Write the page of all scored cells."""
    from ..report.groups import load_groups
    from ..report.html.page import write_page
    from .boards import Row, leaderboard, rows_of
    from .tables import board_of, read

    check_output(out.parent, out.name)
    rows: list[Row] = []
    tables: list[dict[str, Any]] = []
    for each in folders:
        with unpacked(each) as folder:
            own = [board_of(table, name_of(each)) for table in read(folder)]
            tables += own
            if not own or result_folders(folder):
                rows += rows_of(name_of(each), load_groups(folder))
    if not rows and not tables:
        raise EvaluationFailed("no cell has a score (were they run with --predict_only?)")
    boards = leaderboard(rows, tables)
    write_page(out, "KV-cache compression: leaderboard", boards, TEMPLATES, "board")
    count = sum(len(each["cells"]) for each in boards["boards"])
    parts = [f"{n} {what}{'s' * (n != 1)}" for n, what in ((count, "row"), (len(boards["boards"]), "table"))]
    print(f"written: {out} ({' in '.join(parts)}, {out.stat().st_size / 1e3:.0f} kB)")
    return 0
