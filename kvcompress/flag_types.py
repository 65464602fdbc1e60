"""Types for argparse that check a flag's value. Imports nothing heavy.

A flag is checked where it is declared: `add("--overlays", type=whole(0))`. The parser then rejects a wrong value with
one line that names the flag and what is allowed. Every flag with a value has one of these types, or `choices`;
`tests/test_wrong_values.py` finds flags without one and tries wrong values on all others.
"""

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from .errors import MOST, NUMBER, shown


def whole(least: int = 0, most: int = MOST) -> Callable[[str], int]:
    """Return a type for whole numbers from `least` to `most`, in ASCII digits."""

    def convert(text: str) -> int:
        digits = text.removeprefix("-")
        # Python refuses to parse thousands of digits.
        if digits.isascii() and digits.isdigit() and len(digits) < 20 and least <= int(text) <= most:
            return int(text)
        at_most = "" if most == MOST else f" and at most {most}"
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number of at least {least}{at_most}")

    return convert


def number(least: float = -MOST, most: float = MOST, above: float = -math.inf) -> Callable[[str], float]:
    """Return a type for finite numbers of at least `least`, at most `most` and above `above`."""
    bounds = [f"above {above:g}"] if above > -math.inf else []
    bounds += [f"of at least {least:g}"] if least > -MOST else []
    bounds += [f"at most {most:g}"] if most < MOST else []

    def convert(text: str) -> float:
        if NUMBER.fullmatch(text) and least <= (value := float(text)) <= most and value > above:
            return value
        raise argparse.ArgumentTypeError(" ".join([shown(text), "is not a number", " and ".join(bounds)]).rstrip())

    return convert


fraction = number(above=0, most=1)
threads = whole(1, 1024)
positive = number(above=0)


def count_or_fraction(text: str) -> int | float:
    """Parse a number of questions as int, a fraction below 1 as float; lmms-eval tells them apart by type."""
    value = float(text) if NUMBER.fullmatch(text) else math.nan
    if 0 < value < 1:
        return value
    if not 1 <= value <= MOST or value != int(value):
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither a number of questions nor a fraction below 1")
    return int(value)


def seeds(text: str) -> list[int]:
    """Parse one seed for everything, or four: python, numpy, torch, few-shot examples."""
    items = text.split(",")
    if len(items) not in (1, 4):
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither one seed nor four")
    found = [whole(0, 2**32 - 1)(item) for item in items]  # numpy's range
    return found if len(found) == 4 else found * 4


def path(text: str) -> Path:
    """Parse the path of a file or folder, which need not exist but must have a name the file system accepts."""
    try:
        text = os.path.expanduser(text)  # a shell leaves the ~ of --flag=~/folder to the program
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # reading or writing it will report the error
    except (OSError, ValueError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) else str(error)
        raise argparse.ArgumentTypeError(f"{shown(text)} cannot be a path: {reason}") from None
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a path")
    return Path(text)


def folder(text: str) -> Path:
    """Parse an existing folder as an absolute path, as the working directory may change before it is used."""
    found = os.path.expanduser(text)
    if not text or not os.path.isdir(found):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a folder")
    return Path(found).resolve()


def prose(text: str) -> str:
    """Parse text, possibly of several lines."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not text")
    return text


def label(text: str) -> str:
    """Parse a name: not empty, and without control characters."""
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a name: it is empty or has control characters")
    return text


def device_name(text: str) -> str:
    """Parse the name of a torch device, without importing torch."""
    if not re.fullmatch(r"cpu|mps|(cuda|xpu|npu|hpu|mlu|musa)(:\d{1,3})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a device: cpu, cuda, cuda:0, mps, xpu, npu, ...")
    return text


def address(text: str) -> str:
    """Parse the address of a server of chat completions; the path `/v1` is what it has if none is given."""
    if not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not an address such as http://127.0.0.1:8000/v1")
    return text.rstrip("/") if text.rstrip("/").count("/") > 2 else text.rstrip("/") + "/v1"


def new_file(text: str) -> Path:
    """Parse the path of a file, which need not exist."""
    found = path(text)
    if found.name in ("", ".."):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not the name of a file")
    return found
