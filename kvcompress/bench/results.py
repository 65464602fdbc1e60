"""The environment, results file and page of every benchmark; an interrupted run continues from its file.

The page is Markdown: its subject, the command, tables with explanations, and the environment."""

import argparse
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..device import checked_device
from ..errors import KVCompressError, one_line
from ..files import check_output, parse_json, write_text
from .standalone import MEASURED
from .timing import environment


def settle(given: argparse.Namespace) -> torch.device:
    """Return the device to run on, and write the device, dtype and threads in use to `given`.

    `given` need not have these flags. Raises KVCompressError for a device that torch cannot use here, or for one whose
    work is not waited for (standalone.py)."""
    asked = {name: getattr(given, name, None) for name in ("device", "dtype", "threads")}
    device = checked_device(asked["device"])
    check_measured(device)
    given.device, given.dtype = str(device), asked["dtype"] or ("bfloat16" if device.type == "cuda" else "float32")
    torch.set_num_threads(asked["threads"] or torch.get_num_threads())
    given.threads = torch.get_num_threads()
    return device


def check_measured(device: torch.device) -> None:
    """Raise KVCompressError for a device whose work `synchronise` does not wait for."""
    if device.type not in MEASURED:
        raise KVCompressError(f"device {str(device)!r} is not measured: allowed are {', '.join(MEASURED)}")


def check_files(out: Path, *suffixes: str) -> None:
    """Check that the files named `out` with these suffixes can be written. Raises KVCompressError."""
    check_output(out.parent, *(out.with_suffix(suffix).name for suffix in suffixes))


def about(words: Iterable[str], settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the head of results; `words` are those of the command after `python -m`."""
    command = shlex.join(["python", "-m", *words])
    return {"command": command, "settings": settings, "environment": environment(device)}


def page(content: dict[str, Any], title: str, *parts: str) -> str:
    """Return the Markdown page for results with the head `content`."""
    place = ", ".join(f"{name} {value}" for name, value in content["environment"].items())
    blocks = [f"# {title}", f"`{content['command']}`", *(part.rstrip() for part in parts if part), f"Made on {place}."]
    return "\n\n".join(blocks) + "\n"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def stored_setting(file: Path, name: str) -> Any:
    """Return a setting of a results file that is to be resumed; None if it has none, or is damaged."""
    try:
        return parse_json(file.read_bytes())["settings"][name]
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Results:
    """The results file. Its cells are saved one by one, so that a stopped run can continue.

    Attributes:
        content: the head ("settings", "environment", ...), and a list of cells for each of `parts`.
    """

    def __init__(
        self, file: Path, content: dict[str, Any], resume: bool, parts: tuple[str, ...] = ("cells", "largest")
    ):
        self.file, self.content = file, {**content, **{part: [] for part in parts}}
        if not (resume and file.exists()):
            return
        try:
            before = parse_json(file.read_bytes())
            then, now = ({**made["environment"], **made["settings"], "date": None} for made in (before, content))
            stored = {part: [dict(cell) for cell in before[part]] for part in parts}
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise KVCompressError(f"{file} cannot be resumed, it is damaged: {reason}") from None
        for name, value in now.items():
            if then.get(name) != value:
                raise KVCompressError(
                    f"{file} cannot be resumed: it was made with {name}={then.get(name)!r}, not {value!r}"
                )
        self.content |= stored

    def has(self, part: str, **at: object) -> bool:
        return any(all(cell.get(key) == value for key, value in at.items()) for cell in self.content[part])

    def add(self, part: str, cell: dict[str, Any]) -> None:
        self.content[part].append(cell)
        write_text(self.file, json.dumps(self.content, indent=1) + "\n")

    def drop(self, part: str, **at: object) -> None:
        """Forget the cells that `has` finds; the file has them until the next is added."""
        cells = self.content[part]
        self.content[part] = [cell for cell in cells if any(cell.get(key) != value for key, value in at.items())]

    def report(self, text: str) -> None:
        """Write the page next to the file, and print it."""
        write_text(self.file.with_suffix(".md"), text)
        print(text)
