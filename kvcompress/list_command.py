"""`kvcompress methods [WORD]`: every method with its paper and what it does."""

import re

from .bench.flags import Parser, label
from .errors import KVCompressError
from .methods import list_methods


def lines() -> list[str]:
    """A line per method."""
    return [f"{info.name:<20} {info.paper:<32} {_first_sentence(info.cls)}" for info in list_methods().values()]


def main(arguments: list[str]) -> None:
    """Print the lines that have WORD in them, all without one. Raises KVCompressError where none has."""
    parser = Parser(prog="kvcompress methods", description=__doc__)
    parser.add_argument("word", nargs="?", type=label, default="", metavar="WORD", help="to look for; case is ignored")
    word = parser.parse_args(arguments).word
    found = [line for line in lines() if word.lower() in line.lower()]
    if not found:
        raise KVCompressError(f"none of {len(lines())} methods has {word!r} in its line")
    print("\n".join(found))


def _first_sentence(cls: type) -> str:
    paragraph = " ".join((cls.__doc__ or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.:;])\s", paragraph)[0].rstrip(":;")
