"""METHOD on a command line: names, `all`, `all-kv`, `all-tokens`; which can run here. Imports nothing heavy."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from kvcompress.errors import KVCompressError, MissingFile

Checked = TypeVar("Checked")

GROUPS = {
    "all": "every method",
    "all-kv": "those that compress the KV cache, `full` among them",
    "all-tokens": "those that drop vision tokens",
}


def asked_for(names: Iterable[str]) -> dict[str, bool]:
    """Each method that is asked for, once -> whether by its own name. The full cache comes first in a group."""
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
    """The methods that `check` lets pass with what it returns; why others do not, of those asked for by name and of a
    group's.

    Raises KVCompressError for a method asked for by name: what is wrong with it, but for a file that it needs where
    `leaves_out` says that the others shall run; and where none is left.
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
