"""Resolve METHOD of a command line (names, `all`, `all-kv`, `all-tokens`) and find the methods that can run here.

Imports nothing heavy.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from kvcompress.errors import KVCompressError, MissingFile

Checked = TypeVar("Checked")

GROUPS = {
    "all": "every method",
    "all-kv": "those that compress the KV cache, including `full`",
    "all-tokens": "those that drop vision tokens",
}


def asked_for(names: Iterable[str]) -> dict[str, bool]:
    """Return each requested method -> whether it was named itself, not by a group. `full` comes first in a group."""
    from kvcompress.methods import list_methods, method_name
    from kvcompress.tokens import TokenMethod

    found: dict[str, bool] = {}
    for name in names:
        key = method_name(name)
        if key not in GROUPS:
            found[key] = True
            continue
        of_group = [
            info.name
            for info in list_methods().values()
            if key == "all" or issubclass(info.cls, TokenMethod) == (key == "all-tokens")
        ]
        for each in sorted(of_group, key=lambda each: (each != "full", each)):
            found.setdefault(each, False)
    return found


def able(
    asked: dict[str, bool], check: Callable[[str], Checked], leaves_out: bool
) -> tuple[dict[str, Checked], dict[str, str], dict[str, str]]:
    """Return the methods that pass `check` with its results, and why others fail: first those named, then a group's.

    Raises KVCompressError if no method is left, or if one requested by name fails; with `leaves_out`, a named method
    that only lacks a file is left out instead.
    """
    passing, named, of_group = {}, {}, {}
    for method, by_name in asked.items():
        try:
            passing[method] = check(method)
        except KVCompressError as error:
            if by_name and not (leaves_out and isinstance(error, MissingFile)):
                raise
            (named if by_name else of_group)[method] = str(error)
    if not passing:
        raise KVCompressError(next(iter({**named, **of_group}.values())))
    return passing, named, of_group
