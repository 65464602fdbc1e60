"""Wrong values for anything declared: flags of a parser, fields of a pydantic model or a dataclass."""

import argparse
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

LONG = "a" * 5000
# None of these is a number, a valid name, or an existing folder.
NOTHING = [
    "", " ", "nan", "inf", "-inf", "1e999", "9" * 5000, "٣", "1_000", "0x10", "1,5", "'", "]", "\n", "a\x00b", LONG,
]  # fmt: skip
UNPRINTABLE = ["", " ", "a\x00b", "\x1b[31m", "a\nb"]


def wrong_for_flag(action: argparse.Action) -> list[str]:
    """Return texts that the flag must reject: values of no valid type, and for a number also those out of bounds."""
    if action.choices is not None:
        return NOTHING
    kind = getattr(action.type, "__name__", "")
    if kind in ("label", "prose", "path", "new_file", "results_file", "_gen_kwargs", "seeds"):
        return {
            "label": UNPRINTABLE,
            "prose": ["", " ", "a\x00b"],
            "path": ["", " ", "a\x00b", LONG],
            "new_file": ["", ".", "..", "a\x00b", LONG],
            "results_file": ["", ".", "..", "a\x00b", LONG],
            "_gen_kwargs": ["x", "=1", "a=1,a=2"],
            "seeds": [*NOTHING, "-1", "1.5", "1,2", "1,2,3,x", str(2**32)],
        }[kind]
    if kind == "task_name":
        return [*UNPRINTABLE, "7", "A", "a-b", "a b", "../a", LONG]
    if kind == "device_name":
        return [*NOTHING, "gpu", "meta", "cuda:x", "cuda:-1"]
    if kind in ("folder", "folder_or_speech"):
        return ["", "no/such/folder", "a\x00b", LONG]
    return [*NOTHING, "-1", "true", "wide", str(2**31)]


def flags_with_values(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.nargs != 0 and not isinstance(action, argparse._HelpAction)]


def wrong_for_kind(kind: Any) -> list[Any]:
    """Return values that a field declared as `kind` must reject, as YAML or Python would pass them."""
    wrong: list[Any] = [{}, ["x", {}], object]
    kinds = _alternatives(kind)
    numbers = [inner for inner in kinds if _plain(inner) in (int, float)]
    if numbers and str not in kinds:
        wrong += [value for value in NOTHING if value] + [
            "wide",
            float("nan"),
            float("inf"),
            -float("inf"),
            2**31,
            -(2**70),
        ]
        wrong += [] if bool in kinds else [True, False]
        wrong += _beyond(numbers[0])
        if float not in map(_plain, numbers):
            wrong.append(1.5)
    if any(get_origin(inner) is Literal for inner in kinds):
        wrong += [*NOTHING, "no such choice", -7, 0.123]
    if _plain(kinds[0]) is bool:
        wrong += ["", "maybe", 2, 0.5, float("nan")]
    if str in kinds:
        wrong += [""]
    return wrong


def _alternatives(kind: Any) -> list[Any]:
    """Split a union: `Annotated[int, ...] | None` -> [Annotated[int, ...]]."""
    if get_origin(kind) in (Union, UnionType):
        return [inner for each in get_args(kind) for inner in _alternatives(each) if inner is not type(None)]
    if get_origin(kind) is Annotated and get_origin(get_args(kind)[0]) in (Union, UnionType):
        return _alternatives(get_args(kind)[0])
    return [kind]


def _plain(kind: Any) -> Any:
    return _plain(get_args(kind)[0]) if get_origin(kind) is Annotated else kind


def _beyond(kind: Any) -> list[Any]:
    """Return values just outside the bounds of an annotated number."""
    found = []
    for bound in _constraints(kind):
        for name, step in (("gt", 0), ("ge", -1), ("lt", 0), ("le", 1)):
            if (value := getattr(bound, name, None)) is not None:
                found.append(value + step)
    return found


def _constraints(kind: Any) -> Iterator[Any]:
    for bound in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
        yield from getattr(bound, "metadata", [bound])


def spelt(value: Any) -> str:
    """Return a value as typed after `name=`."""
    return str(value).lower() if isinstance(value, bool) else str(value)
