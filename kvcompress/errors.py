"""The one exception for input that the user can correct."""

import difflib
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

Validated = TypeVar("Validated")


class KVCompressError(ValueError):
    """A wrong method, option, ratio, model or call. The message is one line: the value and what is allowed."""


def unknown_name(problem: str, name: object, valid: Iterable[str]) -> KVCompressError:
    """The error "`problem` `name`" for a name that is not among the `valid` ones; points at the nearest one."""
    valid = sorted(valid)
    near = difflib.get_close_matches(str(name), valid, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return KVCompressError(f"{problem} {name!r}{hint}; valid: {', '.join(valid) or 'none'}")


@cache
def _adapter(cls: type[Validated]) -> TypeAdapter[Validated]:
    """Building one takes milliseconds, more than a short generation."""
    return TypeAdapter(cls)


def validated(cls: type[Validated], what: str, values: dict[str, Any]) -> Validated:
    """`cls(**values)` for a dataclass, with the values checked against its annotations. `what` names a field in the
    message of the KVCompressError that is raised for a wrong value."""
    try:
        return _adapter(cls).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # raised by the dataclass's own __post_init__
            raise KVCompressError(first["msg"].removeprefix("Value error, ")) from None
        raise KVCompressError(f"{what} {first['loc'][0]!r} is {first['input']!r}: {first['msg']}") from None
