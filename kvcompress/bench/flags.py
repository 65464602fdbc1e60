"""The parser of the core's commands, and types for its flags."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError

from ..errors import KVCompressError, plain_number, shown


class Parser(argparse.ArgumentParser):
    """Raises KVCompressError where argparse would print its usage and exit."""

    def error(self, message: str) -> None:
        raise KVCompressError(message)


def flag(kind: Any) -> Callable[[str], Any]:
    """An argparse type for what is declared as `kind`, such as PositiveInt: checked as a method's option is."""
    adapter = TypeAdapter(kind)

    def convert(text: str) -> Any:
        try:
            return adapter.validate_python(plain_number(text, kind))
        except ValidationError as error:
            message = error.errors()[0]["msg"]
        except ValueError as error:
            message = str(error)
        raise argparse.ArgumentTypeError(f"{shown(text)}: {message}")

    return convert


Threads = Annotated[int, Field(ge=1, le=1024)]
PositiveNumber = Annotated[float, Field(gt=0)]


def label(text: str) -> str:
    """Not empty, and without control characters."""
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{shown(text)}: Input should be a name without control characters")
    return text


def device_name(text: str) -> str:
    """What torch knows as a device."""
    try:
        if torch.device(text).type != "meta":
            return text
    except (RuntimeError, ValueError):
        pass
    raise argparse.ArgumentTypeError(f"{shown(text)} is not a device: cpu, cuda, cuda:0")


def new_file(text: str) -> Path:
    """A file that need not exist, under a name that the file system takes."""
    path = Path(text)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) else str(error)
        raise argparse.ArgumentTypeError(f"{shown(text)} cannot be a file: {reason}") from None
    if path.name in ("", ".."):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not the name of a file")
    return path
