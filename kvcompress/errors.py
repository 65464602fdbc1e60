"""The one exception for input that the user can correct."""

import difflib
from collections.abc import Iterable


class KVCompressError(ValueError):
    """A wrong method, option, ratio, model or call. The message is one line: the value and what is allowed."""


def unknown_name(problem: str, name: object, valid: Iterable[str]) -> KVCompressError:
    """The error "`problem` `name`" for a name that is not among the `valid` ones; points at the nearest one."""
    valid = sorted(valid)
    near = difflib.get_close_matches(str(name), valid, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return KVCompressError(f"{problem} {name!r}{hint}; valid: {', '.join(valid) or 'none'}")
