"""The names of tasks, methods and arguments. They are found in the text of files, so that a misspelt one is reported at
once: importing lmms-eval takes ten seconds, and importing the core four."""

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from kvcompress.command_line import called
from kvcompress.errors import KVCompressError, MissingFile, nearest, shown
from kvcompress.methods import NO_FILE

from ..tasks import BUNDLED_TASKS
from .errors import UsageError
from .request import Request
from .yaml_files import read_yaml

Checked = TypeVar("Checked")
Index = dict[str, tuple[str, Path]]  # name -> `task`, `group` or `tag`, and the file that defines it

GROUPS = ("all", "all-kv", "all-tokens")  # every method; those of the KV cache, with `full`; of vision tokens
PLUGIN = Path(__file__).parents[1]
INPUT_METHODS = PLUGIN / "model" / "input_methods.py"
# Prefix of a task of lm-evaluation-harness if lmms-eval has a task of the same name.
LM_EVAL = "lm-eval/"
LM_EVAL_PACKAGE = "lm-eval[ruler,longbench]"
# A key of a task file with its value: a scalar, or a list on the same line or below.
TASK_KEYS = re.compile(r"^[\"']?(task|group|tag|include)[\"']?[ \t]*:[ \t]*(.*(?:\n[ \t]*[-#].*)*)", re.MULTILINE)
REGISTERED = re.compile(rb"^@(?:(?:kvcompress\.)?register|input)_method\((.)([^\"']*)", re.MULTILINE)
# Fields of classes, and keys of dictionaries.
ARGUMENTS = re.compile(rb"^    (?:(\w+): |\"(\w+)\": )", re.MULTILINE)


def check_tasks(names: Iterable[str], include_path: Path | None = None) -> None:
    """Raise UsageError for an unknown task, or for a file in `include_path` that cannot be read."""
    if include_path is not None:
        for file in sorted(include_path.rglob("*.yaml")):
            read_yaml(file, "task file")
    own = _own(include_path)
    for name in names:
        if not is_lm_eval(name, include_path):
            continue
        plain = name.removeprefix(LM_EVAL)
        check_lm_eval(f"unknown task {shown(name)}{nearest(name, installed_tasks() | own)}; ")
        if plain not in lm_eval_tasks() and (plain == name or plain not in own):
            known = lm_eval_tasks() if plain != name else installed_tasks() | own | lm_eval_tasks()
            hint = nearest(plain, known) or f"; list them with: {called('list')} tasks"
            raise UsageError(f"unknown task {shown(name)}{hint}")


def check_lm_eval(before: str = "") -> None:
    """Raise UsageError if lm-evaluation-harness is not installed; `before`: the beginning of its message."""
    if lm_eval_folder() is None:
        raise UsageError(
            f"{before}lm-evaluation-harness, whose tasks run here too, is not installed: "
            f"{sys.executable} -m pip install '{LM_EVAL_PACKAGE}'"
        )


def is_lm_eval(name: str, include_path: Path | None = None) -> bool:
    """Return whether a task is lm-evaluation-harness's: by its prefix, or because no other source has it."""
    return name.startswith(LM_EVAL) or (name not in installed_tasks() and name not in _own(include_path))


def canonical(name: str, include_path: Path | None = None) -> str:
    """Return a task's canonical name, which has the prefix `lm-eval/` only if it needs it."""
    plain = name.removeprefix(LM_EVAL)
    return plain if is_lm_eval(plain, include_path) else name


def _own(include_path: Path | None) -> Index:
    """Return the tasks in the user's folder."""
    return {} if include_path is None else index_of(include_path)


def check_names(request: Request) -> None:
    """Raise UsageError for an unknown task, method or argument.

    A name that passes may still be wrong, because the text of files tells less than the code; `Plan.of` and
    `find_tasks` check again.
    """
    check_tasks(request.tasks, request.flags.include_path)
    # A notebook or a user's file may register methods; and once the core is imported, the full check is quick.
    if "kvcompress.clusters" in sys.modules or os.environ.get("KVCOMPRESS_METHODS"):
        return
    methods = method_names()
    for method in request.methods:
        valid = [*methods, *GROUPS]
        if methods and method.lower().replace("_", "-") not in valid:
            hint = nearest(method, valid) or NO_FILE
            raise UsageError(f"there is no method {shown(method)}{hint}; valid: {', '.join(valid)}")
    arguments = argument_names()
    for argument in request.arguments:
        if argument not in arguments and (near := nearest(argument, arguments)):
            raise UsageError(f"there is no argument {shown(argument)}{near}")


def asked_for(names: Iterable[str]) -> dict[str, bool]:
    """Map each requested method to whether it was named itself, not through a group. `full` comes first in a group."""
    from kvcompress.methods import list_methods, method_name
    from kvcompress.tokens import TokenMethod

    found: dict[str, bool] = {}
    for name in names:
        key = method_name(name)
        if key not in GROUPS:
            found[key] = True
            continue
        of_group = [
            info.name
            for info in list_methods().values()
            if key == "all" or issubclass(info.cls, TokenMethod) == (key == "all-tokens")
        ]
        for each in sorted(of_group, key=lambda each: (each != "full", each)):
            found.setdefault(each, False)
    return found


def able(
    asked: dict[str, bool], check: Callable[[str], Checked], leaves_out: bool
) -> tuple[dict[str, Checked], dict[str, str], dict[str, str]]:
    """Return the methods that pass `check` with its results, and why others fail: first those named, then a group's.

    Raises KVCompressError if no method is left, or if one requested by name fails; with `leaves_out`, a named method
    that only lacks a file is left out instead.
    """
    passing, named, of_group = {}, {}, {}
    for method, by_name in asked.items():
        try:
            passing[method] = check(method)
        except KVCompressError as error:
            if by_name and not (leaves_out and isinstance(error, MissingFile)):
                raise
            (named if by_name else of_group)[method] = str(error)
    if not passing:
        raise KVCompressError(next(iter({**named, **of_group}.values())))
    return passing, named, of_group


def lm_eval_folder() -> Path | None:
    """Return the task folder of lm-evaluation-harness; None if it is not installed."""
    return _package("lm_eval") / "tasks" if importlib.util.find_spec("lm_eval") else None


@cache
def lm_eval_tasks() -> Index:
    """Return the tasks of lm-evaluation-harness; empty if it is not installed."""
    return {} if lm_eval_folder() is None else index_of(lm_eval_folder())


@cache
def installed_tasks() -> Index:
    """Return all tasks, groups and tags of lmms-eval, and the bundled ones."""
    return index_of(lmms_eval_folder()) | index_of(BUNDLED_TASKS)


def lmms_eval_folder() -> Path:
    """Return the folder of lmms-eval's task files."""
    return _package("lmms_eval") / "tasks"


def index_of(folder: Path) -> Index:
    """Return what a folder's files define, as in lmms-eval's index, whose parsing takes seconds."""
    files = _files(folder, ending=".yaml")
    return {name: (kind, file) for file in files for name, kind in defined_in(file).items()}


def defined_in(file: Path) -> dict[str, str]:
    """Return name -> kind for everything that one task file defines."""
    values = _task_keys(file)
    of_task = values.get("task", "")
    if of_task.partition("#")[0].strip()[:1] in ("", "[", "-"):  # a list is a group's tasks; or there is no task
        return dict.fromkeys(_items(values.get("group", "")) if of_task else [], "group")
    tags = [tag for key in ("group", "tag") for tag in _items(values.get(key, ""))]
    return {**dict.fromkeys(tags, "tag"), **dict.fromkeys(_items(of_task), "task")}


def _task_keys(file: Path, above: tuple[Path, ...] = ()) -> dict[str, str]:
    """Return the TASK_KEYS in a file and in the files it includes. `above`: the files that include this one."""
    values = dict(TASK_KEYS.findall(file.read_text(encoding="utf-8-sig", errors="replace")))
    included = [file.parent / name for name in _items(values.pop("include", ""))]
    included = [each for each in included if os.path.isfile(each) and each not in above]
    return {key: value for each in included for key, value in _task_keys(each, (*above, file)).items()} | values


def _items(value: str) -> list[str]:
    """Return a scalar, or the items of a list, without quotes and comments."""
    lines = (re.sub(r"(^|\s)#.*|^\s*-\s", "", line) for line in value.splitlines())
    return [name for line in lines for name in re.findall(r"[^\s,\[\]\"']+", line)]


@cache
def method_names() -> list[str]:
    """Return all methods; empty if one registers under a name that is not a literal."""
    core = _package("kvcompress")
    texts = [*_texts(core / "clusters", core / "tokens", ending=".py"), INPUT_METHODS.read_bytes()]
    found = [match for text in texts for match in REGISTERED.findall(text)]
    return sorted(name.decode() for _, name in found) if all(quote in (b"'", b'"') for quote, _ in found) else []


@cache
def argument_names() -> set[str]:
    """Return the model's arguments, the options of all methods, and some names that are neither."""
    core = _package("kvcompress")
    texts = [*_texts(core / "clusters", core / "tokens", core / "policy", ending=".py")]
    texts += [(PLUGIN / "model" / "arguments.py").read_bytes(), INPUT_METHODS.read_bytes()]
    pairs = (match for text in texts for match in ARGUMENTS.findall(text))
    return {(field or key).decode() for field, key in pairs} | {"budget", "preset"}


def _package(name: str) -> Path:
    """Return a package's folder without importing it."""
    return Path(importlib.util.find_spec(name).submodule_search_locations[0])


def _texts(*folders: Path, ending: str) -> Iterator[bytes]:
    return (file.read_bytes() for folder in folders for file in _files(folder, ending))


def _files(folder: Path, ending: str) -> Iterator[Path]:
    for root, _, files in os.walk(folder):
        yield from (Path(root, file) for file in files if file.endswith(ending))
