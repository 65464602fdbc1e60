"""`KVCompressError`, the exception for input that the user can correct, and checks of values."""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

Validated = TypeVar("Validated")
MOST = 2**31 - 1  # no option makes sense beyond it, and libraries fail with messages of their own
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
LONGEST_SHOWN = 80


class KVCompressError(ValueError):
    """A wrong method, option, ratio, model or call. The message is one line: the value and what is allowed."""

    exit_code = 2  # exit code of a command that fails with it


class MissingFile(KVCompressError):
    """A method needs a file, such as a calibration or a checkpoint, that it was not given."""


def unknown_name(problem: str, name: object, valid: Iterable[str], hint: str = "") -> KVCompressError:
    """Return the error "`problem` `name`" for a name that is not `valid`, with a hint, or the nearest valid name."""
    valid = sorted(valid)
    hint = hint or nearest(name, valid)
    return KVCompressError(f"{problem} {shown(name)}{hint}; valid: {', '.join(valid) or 'none'}")


def nearest(name: object, valid: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` if a valid name is near, otherwise an empty string."""
    near = difflib.get_close_matches(str(name), list(valid), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn any exception from loading a checkpoint into a KVCompressError of one line."""
    try:
        yield
    except KVCompressError:
        raise
    except Exception as error:
        message = one_line(error) or "no reason given"
        raise KVCompressError(
            f"model {shown(name)} cannot be loaded: {type(error).__name__}: {message[:500]}"
        ) from error


def one_line(error: object, most: int | None = None) -> str:
    """Return an error's message in one line, of at most so many characters."""
    return " ".join(str(error).split())[:most]


def shown(value: object) -> str:
    """Format a value for a message: quoted, and cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def plain_number(value: Any, kind: Any) -> Any:
    """Convert text to the number or tuple of numbers that `kind` declares; return other values unchanged.

    A tuple is written as a comma-separated list. Raises ValueError for values that only look like numbers: true and
    false, nan and infinities, `1_000`, digits of other scripts, and numbers beyond MOST.
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
    """Return the types in an annotation: `Annotated[int, ...] | None` -> {int, NoneType}."""
    if get_origin(kind) is Annotated:
        return _kinds(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(kind)))
    return {kind}


@cache
def _adapters(cls: type) -> dict[str, tuple[Any, TypeAdapter[Any]]]:
    """Map each field to its declared type and validator. Building one takes longer than a short generation.

    Raises KVCompressError for a type by which no value can be checked."""
    try:
        kinds = get_type_hints(cls, include_extras=True)
        return {field.name: (kinds[field.name], TypeAdapter(kinds[field.name])) for field in fields(cls)}
    except (NameError, PydanticUserError) as error:
        raise KVCompressError(
            f"{cls.__name__}: an option has a type by which no value can be checked; use numbers, str, bool, Literal "
            f"and tuples: {one_line(error, 200)}"
        ) from error


def checked(cls: type, name: str, value: Any) -> Any:
    """Return a value for a dataclass field, converted to its declared type. Raises ValueError with what is allowed."""
    kind, adapter = _adapters(cls)[name]
    try:
        return adapter.validate_python(plain_number(value, kind))
    except ValidationError as error:
        raise ValueError(first_fault(error)[1]) from None


def first_fault(error: ValidationError) -> tuple[str, str, Any]:
    """Return the place, the message and the input of the first fault that pydantic found."""
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, "), first["input"]


def validated(cls: type[Validated], what: str, values: dict[str, Any]) -> Validated:
    """Create `cls(**values)` for a dataclass after checking the values against its annotations.

    Raises KVCompressError for a wrong value; `what` describes a field in its message."""
    own = {}
    for name, value in values.items():
        try:
            own[name] = checked(cls, name, value)
        except KVCompressError:  # the type is wrong, not the value
            raise
        except ValueError as error:
            raise KVCompressError(f"{what} {name!r} is {shown(value)}: {error}") from None
    try:
        return cls(**own)
    except ValueError as error:  # from its __post_init__
        raise KVCompressError(str(error)) from None
