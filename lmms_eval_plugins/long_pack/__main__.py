"""`kvcompress long-pack`: generate long tasks for lmms-eval, with needles among pictures and documents of many pages.

NAME_needle hides needles among many pictures; NAME_document has documents of many pages. Both are drawn from a seed and
run with `./scripts/run_eval.sh NAME_needle MODEL METHOD RATIO --include_path DIR`; docs/long-pack.md has the details.
"""

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any

from kvcompress.command_line import Parser, called, returns_exit_code
from kvcompress.errors import nearest, shown
from kvcompress.files import check_output
from kvcompress.flag_types import number, path, whole

from ..cells.errors import UsageError
from .dataset import DATA_FILE, KINDS, Pack, write
from .documents import MOST_PAGES, check_page
from .needles import smallest_picture
from .prompts import Look

NAME = re.compile(r"[a-z][a-z0-9_]{0,39}", re.ASCII)
MOST_PIXELS = 8192  # per side
MOST_PICTURES = 200_000  # pictures and pages of all prompts; drawing them takes about half an hour


def items(convert: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of comma-separated lists that drops duplicates."""

    def listed(text: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(convert(item.strip()) for item in text.split(",")))

    return listed


def kind(text: str) -> str:
    if text not in KINDS:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not one of {', '.join(KINDS)}{nearest(text, KINDS)}")
    return text


def size(text: str) -> tuple[int, int]:
    sides = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text, re.ASCII)
    if not sides or not all(1 <= int(side) <= MOST_PIXELS for side in sides.groups()):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a size in pixels, WIDTHxHEIGHT, with sides of at most {MOST_PIXELS}"
        )
    return int(sides[1]), int(sides[2])


def task_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a name of at most 40 lower-case letters, digits and _, starting with a letter"
        )
    return text


def parser() -> argparse.ArgumentParser:
    this = Parser(
        "long-pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"kinds: {', '.join(KINDS)}",
    )
    add, pack, look = this.add_argument, Pack(), Look()
    lengths, depths = (",".join(f"{value:g}" for value in values) for values in (pack.lengths, pack.depths))
    picture_size, page_size = ("{}x{}".format(*sides) for sides in (look.picture_size, look.page_size))
    add("--out", type=path, required=True, metavar="DIR", help="folder for the tasks' folders, created if missing")
    add("--seed", type=whole(), default=pack.seed, help=f"same seed, same bytes ({pack.seed})")
    add("--name", type=task_name, default=pack.name, help=f"prefix of the tasks' names ({pack.name})")
    add("--lengths", type=items(whole(2, 4096)), default=lengths, help=f"pictures or pages per prompt ({lengths})")
    add("--questions", type=whole(1), default=pack.questions, help=f"questions per kind and length ({pack.questions})")
    add(
        "--depths",
        type=items(number(0, 1)),
        default=depths,
        help=f"depths of the needle, used in turn; 0 is the first picture or page, 1 the last ({depths})",
    )
    add("--kinds", type=items(kind), default=KINDS, help="kinds of questions (default: all those below)")
    add("--picture-size", type=size, default=picture_size, metavar="WxH", help=f"pixels of a picture ({picture_size})")
    add("--page-size", type=size, default=page_size, metavar="WxH", help=f"pixels of a page ({page_size})")
    add("--font-px", type=whole(6, 512), default=look.font_px, help=f"height of the text in pixels ({look.font_px})")
    add("--words", type=whole(1, 10_000), default=look.words, help=f"words before each picture ({look.words})")
    add(
        "--distractors",
        type=whole(0, 20),
        default=look.distractors,
        help=f"most other needles of the same form, with other names ({look.distractors})",
    )
    return this


def pack_of(argv: list[str]) -> tuple[Pack, argparse.Namespace]:
    """Parse the command line into a `Pack` and the flags. Raises UsageError."""
    flags = parser().parse_args(argv)
    look = Look(flags.picture_size, flags.page_size, flags.font_px, flags.words, flags.distractors)
    pack = Pack(flags.seed, flags.name, flags.lengths, flags.questions, flags.depths, flags.kinds, look)
    if (pictures := pack.pictures) > MOST_PICTURES:
        raise UsageError(
            f"--questions, --kinds and --lengths ask for {pictures} pictures and pages in all prompts; at most "
            f"{MOST_PICTURES} are drawn"
        )
    smallest = smallest_picture(look.font_px)
    if "needle" in pack.tasks() and any(side < least for side, least in zip(look.picture_size, smallest, strict=True)):
        raise UsageError(
            f"--picture-size {flags.picture_size[0]}x{flags.picture_size[1]} is too small for a card with text of "
            f"--font-px {look.font_px}, which needs {smallest[0]}x{smallest[1]} pixels"
        )
    if "document" in pack.tasks():
        if max(pack.lengths) > MOST_PAGES:
            raise UsageError(f"--lengths {max(pack.lengths)}: a document has at most {MOST_PAGES} pages (--kinds)")
        check_page(look, max(pack.lengths))
    return pack, flags


@returns_exit_code("tasks")
def main(argv: list[str]) -> None:
    """Write the tasks."""
    pack, flags = pack_of(argv)
    check_output(flags.out)
    names = {}
    print(f"drawing prompts with {pack.pictures} pictures and pages in all", file=sys.stderr, flush=True)
    for file, count in write(pack, flags.out):
        names[file] = count
        if sys.stderr.isatty():
            print(f"\r{file.stem}: {count} questions", end="\r", file=sys.stderr, flush=True)
    for file, count in names.items():
        print(f"written: {file}, {count} questions, {(file.parent / DATA_FILE).stat().st_size / 1e6:.1f} MB")
    tasks = ",".join(file.stem for file in names)
    print(f"run: {called('eval')} {tasks} MODEL full,snapkv 0.2 --include_path {flags.out}")


if __name__ == "__main__":
    sys.exit(main())
