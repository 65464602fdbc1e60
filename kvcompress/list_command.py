"""`kvcompress list methods [WORD]`: every method with its paper and what it does."""

import argparse
import re
from collections.abc import Callable

from .command_line import Parser
from .errors import KVCompressError
from .flag_types import label
from .methods import MethodInfo, list_methods


def methods() -> list[str]:
    """Return one line per method."""
    return [*map(line_of, list_methods().values())]


def line_of(info: MethodInfo) -> str:
    """Return a method's name, its paper and what it does."""
    return f"{info.name:<20} {info.paper:<32} {_first_sentence(info.cls)}"


KINDS: dict[str, Callable[[], list[str]]] = {"methods": methods}


def parser(kinds: dict[str, Callable[[], list[str]]] = KINDS) -> argparse.ArgumentParser:
    """Create the parser; `kinds` maps what can be listed to its lines."""
    this = Parser("list", description=f"List {', '.join(kinds)}, one per line.")
    this.add_argument("kind", choices=list(kinds))
    this.add_argument("word", nargs="?", type=label, metavar="WORD", help="print only lines with it; case is ignored")
    return this


def main(arguments: list[str], kinds: dict[str, Callable[[], list[str]]] = KINDS) -> None:
    """Print the lines that contain WORD, or all. Raises KVCompressError if there are none."""
    given = parser(kinds).parse_args(arguments)
    lines, word = kinds[given.kind](), given.word or ""
    found = [line for line in lines if word.lower() in line.lower()]
    if not found:
        raise KVCompressError(f"no line of {len(lines)} {given.kind} contains {word!r}")
    print("\n".join(found))


def _first_sentence(cls: type) -> str:
    paragraph = " ".join((cls.__doc__ or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s(?![^(]*\))", paragraph)[0]  # a full stop in parentheses ends no sentence
