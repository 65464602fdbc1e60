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
# A key of a task file with its value: a scalar, or a list, in a line or below.
TASK_KEYS = re.compile(r"^[\"']?(task|group|tag|include)[\"']?[ \t]*:[ \t]*(.*(?:\n[ \t]*[-#].*)*)", re.MULTILINE)
REGISTERED = re.compile(rb"^@(?:kvcompress\.)?register_method\((.)([^\"']*)", re.MULTILINE)
# Fields of classes, and keys of tables.
ARGUMENTS = re.compile(rb"^    (?:(\w+): |\"(\w+)\": )", re.MULTILINE)


def check_tasks(names: Iterable[str], include_path: Path | None = None) -> None:
    """Raises UsageError for a task that nobody knows, and for a file of `include_path` that cannot be read."""
    known = installed_tasks()
    if include_path is not None:
        for file in sorted(include_path.rglob("*.yaml")):
            read_yaml(file, "task file")
        known = known | task_kinds(include_path).keys()
    for name in names:
        if name not in known:
            hint = nearest(name, known) or "; list them with: scripts/run_eval.sh list tasks"
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
def installed_tasks() -> frozenset[str]:
    """Every task, group and tag of lmms-eval, and the bundled ones."""
    return frozenset(name for folder in task_folders().values() for name in task_kinds(folder))


def task_folders() -> dict[str, Path]:
    """Where tasks come from -> the folder of their files."""
    return {"bundled": PLUGIN / "tasks", "lmms-eval": _package("lmms_eval") / "tasks"}


def task_kinds(folder: Path) -> dict[str, str]:
    """Name -> `task`, `group` or `tag`: what lmms-eval's index of a folder's files has."""
    kinds: dict[str, str] = {}
    for file in _files(folder, ending=".yaml"):
        kinds.update(defined_in(file))
    return kinds


def defined_in(file: Path) -> dict[str, str]:
    """What one task file defines."""
    values = _task_keys(file)
    of_task = values.get("task", "")
    if of_task.partition("#")[0].strip()[:1] in ("", "[", "-"):  # a list: of a group's tasks, or there is none
        return dict.fromkeys(_items(values.get("group", "")) if of_task else [], "group")
    tags = [tag for key in ("group", "tag") for tag in _items(values.get(key, ""))]
    return {**dict.fromkeys(tags, "tag"), **dict.fromkeys(_items(of_task), "task")}


def _task_keys(file: Path, above: tuple[Path, ...] = ()) -> dict[str, str]:
    """The keys of TASK_KEYS in a file, and in those that it includes. `above`: the files that include this one."""
    values = dict(TASK_KEYS.findall(file.read_text(encoding="utf-8-sig", errors="replace")))
    included = [file.parent / name for name in _items(values.pop("include", ""))]
    included = [each for each in included if os.path.isfile(each) and each not in above]
    return {key: value for each in included for key, value in _task_keys(each, (*above, file)).items()} | values


def _items(value: str) -> list[str]:
    """A scalar, or the items of a list, without quotes and comments."""
    lines = (re.sub(r"(^|\s)#.*|^\s*-\s", "", line) for line in value.splitlines())
    return [name for line in lines for name in re.findall(r"[^\s,\[\]\"']+", line)]


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
    return {(field or key).decode() for field, key in pairs} | {"budget", "preset"}


def _package(name: str) -> Path:
    """Where a package is, without importing it."""
    return Path(importlib.util.find_spec(name).submodule_search_locations[0])


def _texts(*folders: Path, ending: str) -> Iterator[bytes]:
    return (file.read_bytes() for folder in folders for file in _files(folder, ending))


def _files(folder: Path, ending: str) -> Iterator[Path]:
    for root, _, files in os.walk(folder):
        yield from (Path(root, file) for file in files if file.endswith(ending))
