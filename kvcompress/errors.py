"""The one exception for input that the user can correct."""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

Validated = TypeVar("Validated")
MOST = 2**31 - 1  # no option means anything beyond it, and libraries fail in their own words
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
LONGEST_SHOWN = 80


class KVCompressError(ValueError):
    """A wrong method, option, ratio, model or call. The message is one line: the value and what is allowed."""

    exit_code = 2  # of a command that it ends


class MissingFile(KVCompressError):
    """A method needs a file, such as a calibration or a checkpoint, that it was not given."""


def unknown_name(problem: str, name: object, valid: Iterable[str]) -> KVCompressError:
    """The error "`problem` `name`" for a name that is not among the `valid` ones; points at the nearest one."""
    valid = sorted(valid)
    return KVCompressError(f"{problem} {shown(name)}{nearest(name, valid)}; valid: {', '.join(valid) or 'none'}")


def nearest(name: object, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)` where some valid name is near, else nothing."""
    near = difflib.get_close_matches(str(name), list(valid), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


@contextmanager
def loading(name: str) -> Iterator[None]:
    """What a library says of a checkpoint that it cannot read, in whatever words and by whatever exception, becomes a
    KVCompressError of one line."""
    try:
        yield
    except KVCompressError:
        raise
    except Exception as error:
        message = " ".join(str(error).split()) or "no reason given"
        raise KVCompressError(
            f"model {shown(name)} cannot be loaded: {type(error).__name__}: {message[:500]}"
        ) from error


def shown(value: object) -> str:
    """The value as it stands in a message: quoted, and cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def plain_number(value: Any, kind: Any) -> Any:
    """A value for what is declared as `kind`: unchanged, but where that is a number, text becomes the number that it
    spells, and a comma list becomes the numbers where a tuple is declared.

    Raises ValueError for what only looks like a number: true and false, nan and infinities, `1_000`, digits of other
    scripts, and what is beyond MOST.
    """
    if get_origin(kind) is tuple and isinstance(value, str | list | tuple):
        items = value.strip("()").split(",") if isinstance(value, str) else value
        return tuple(plain_number(item, get_args(kind)[0]) for item in items)
    kinds = _kinds(kind)
    if not kinds & {int, float} or bool in kinds or value is None or (isinstance(value, str) and str in kinds):
        return value
    a_number = "Input should be a whole number" if float not in kinds else "Input should be a number"
    number = value
    if isinstance(value, str):
        if not NUMBER.fullmatch(value) or len(value) > LONGEST_SHOWN:
            raise ValueError(a_number)
        number = int(value) if value.lstrip("+-").isdigit() else float(value)
    if isinstance(number, bool):
        raise ValueError(f"{a_number}, not true or false")
    if isinstance(number, int | float) and not abs(number) <= MOST:  # nan is not
        raise ValueError(f"{a_number} between -{MOST} and {MOST}")
    return number


def _kinds(kind: Any) -> set[Any]:
    """`Annotated[int, ...] | None` -> {int, NoneType}."""
    if get_origin(kind) is Annotated:
        return _kinds(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(kind)))
    return {kind}


@cache
def _adapters(cls: type) -> dict[str, tuple[Any, TypeAdapter[Any]]]:
    """Field -> its declared type, and what checks it. Building one takes milliseconds, more than a short generation."""
    kinds = get_type_hints(cls, include_extras=True)
    return {field.name: (kinds[field.name], TypeAdapter(kinds[field.name])) for field in fields(cls)}


def checked(cls: type, name: str, value: Any) -> Any:
    """A value for a field of a dataclass, as its declared type has it. Raises ValueError with what is allowed."""
    kind, adapter = _adapters(cls)[name]
    try:
        return adapter.validate_python(plain_number(value, kind))
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None


def validated(cls: type[Validated], what: str, values: dict[str, Any]) -> Validated:
    """`cls(**values)` for a dataclass, with the values checked against its annotations. `what` names a field in the
    message of the KVCompressError that is raised for a wrong value."""
    own = {}
    for name, value in values.items():
        try:
            own[name] = checked(cls, name, value)
        except ValueError as error:
            raise KVCompressError(f"{what} {name!r} is {shown(value)}: {error}") from None
    try:
        return cls(**own)
    except ValueError as error:  # its own __post_init__
        raise KVCompressError(str(error)) from None
