"""Which tasks, methods and arguments there are, found in the text of files: importing lmms-eval takes ten seconds, the
core four, and a misspelt name is answered before that."""

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from .command_line import Request
from .errors import UsageError, nearest
from .flag_types import shown
from .yaml_files import read_yaml

PLUGIN = Path(__file__).parents[1]
# A value of these keys, or a list of them below.
TASK_NAMES = re.compile(rb"^[\"']?(?:task|group|tag)[\"']?[ \t]*:[ \t]*(.*(?:\n[ \t]*-.*)*)", re.MULTILINE)
REGISTERED = re.compile(rb"^@(?:kvcompress\.)?register_method\((.)([^\"']*)", re.MULTILINE)
# Fields of classes, and keys of tables.
ARGUMENTS = re.compile(rb"^    (?:(\w+): |\"(\w+)\": )", re.MULTILINE)


def check_tasks(names: Iterable[str], include_path: Path | None = None) -> None:
    """Raises UsageError for a task that nobody knows, and for a file of `include_path` that cannot be read."""
    known = task_names()
    if include_path is not None:
        for file in sorted(include_path.rglob("*.yaml")):
            read_yaml(file, "task file")
        known = known | task_names(include_path)
    for name in names:
        if name not in known:
            hint = nearest(name, known) or "; list them with: python -m lmms_eval --tasks list"
            raise UsageError(f"unknown task {shown(name)}{hint}")


def check_names(request: Request) -> None:
    """Raises UsageError for a task, method or argument that nobody knows.

    What passes may still be wrong, for the text of files tells less than the code: `Plan.of` and `find_tasks` know.
    """
    check_tasks(request.tasks, request.flags.include_path)
    if "kvcompress" in sys.modules:  # a notebook may have methods of its own, and what is imported answers at once
        return
    methods = method_names()
    for method in request.methods:
        if methods and method.lower().replace("_", "-") not in methods:
            raise UsageError(
                f"there is no method {shown(method)}{nearest(method, methods)}; valid: {', '.join(methods)}"
            )
    arguments = argument_names()
    for argument in request.arguments:
        if argument not in arguments and (near := nearest(argument, arguments)):
            raise UsageError(f"there is no argument {shown(argument)}{near}")


@cache
def task_names(folder: Path | None = None) -> set[str]:
    """Every name in the task files of a folder, by default of lmms-eval's and the bundled ones: of tasks, groups and
    tags, and some that are none."""
    folders = [folder] if folder else [_package("lmms_eval") / "tasks", PLUGIN / "tasks"]
    values = (value for text in _texts(*folders, ending="yaml") for value in TASK_NAMES.findall(text))
    return {name.decode(errors="replace") for value in values for name in re.findall(rb"[^\s,\[\]\"'#]+", value)}


@cache
def method_names() -> list[str]:
    """The methods of the core; empty where one registers under a name that its text does not show."""
    core = _package("kvcompress")
    found = [
        match for text in _texts(core / "clusters", core / "tokens", ending=".py") for match in REGISTERED.findall(text)
    ]
    return sorted(name.decode() for _, name in found) if all(quote in (b"'", b'"') for quote, _ in found) else []


@cache
def argument_names() -> set[str]:
    """Arguments of the model and options of all methods, and some names that are neither."""
    core = _package("kvcompress")
    texts = [*_texts(core / "clusters", core / "tokens", core / "policy", ending=".py")]
    texts.append((PLUGIN / "model" / "arguments.py").read_bytes())
    pairs = (match for text in texts for match in ARGUMENTS.findall(text))
    return {(field or key).decode() for field, key in pairs} | {"budget"}


def _package(name: str) -> Path:
    """Where a package is, without importing it."""
    return Path(importlib.util.find_spec(name).submodule_search_locations[0])


def _texts(*folders: Path, ending: str) -> Iterator[bytes]:
    for folder in folders:
        for root, _, files in os.walk(folder):
            for file in files:
                if file.endswith(ending):
                    yield Path(root, file).read_bytes()
