"""Fingerprint everything that a cell's numbers depend on: the model's files, the data, the code."""

import ast
import contextlib
import hashlib
import inspect
import json
import os
import sys
from dataclasses import asdict, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from .results import Cell

if TYPE_CHECKING:
    from lmms_eval.api.task import Task

    from ..model.arguments import ModelArguments

# Modules of `cells` that affect no answer or measurement. What they read from a command line is in the fingerprint.
WITHOUT_EFFECT = (
    "__init__.py",
    "cell_log.py",
    "contents.py",
    "errors.py",
    "identity.py",
    "kept_tokens_file.py",
    "listing.py",
    "machine.py",
    "names.py",
    "plan.py",
    "processes.py",
    "progress.py",
    "results.py",
    "served.py",
    "yaml_files.py",
)
NOT_OWN = ("kvcompress", "lmms_eval_plugins", "builtins", "abc", "typing")  # what users do not write


def files_identity(path: Path) -> list[list]:
    """Return [name, bytes, modification time in ns] of a local checkpoint's files, which changes if it is replaced."""
    stats = [(file.relative_to(path), file.stat()) for file in sorted(path.rglob("*")) if file.is_file()]
    return [[str(name), stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def code_identity(*packages_or_files: Path) -> str:
    """Hash Python sources without comments, docstrings and formatting: only changes of code recompute a cell."""
    digest = hashlib.sha256()
    for path in packages_or_files:
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = source.relative_to(path).as_posix() if path.is_dir() else source.name
            digest.update(name.encode())
            digest.update(ast.dump(_without_docstrings(ast.parse(source.read_text(encoding="utf-8")))).encode())
    return digest.hexdigest()[:16]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:]
    return tree


def task_identity(task: "Task") -> str:
    """Hash how a task asks and scores: its settings, and the files of the functions and classes they name."""
    sources = set()

    def named(value: Any) -> Any:
        if is_dataclass(value):
            return vars(value)
        value = getattr(value, "func", value)  # of a partial
        if callable(value):
            with contextlib.suppress(TypeError, OSError):  # a builtin has no file
                sources.add(inspect.getsourcefile(value))
        return getattr(value, "__qualname__", type(value).__name__)

    for cls in type(task).__mro__:
        if not _is_library(cls):
            named(cls)
    settings = {key: value for key, value in vars(task.config).items() if not key.startswith("dataset_")}
    if isinstance(settings.get("metadata"), dict):  # lm-eval records the path of the task's file there
        settings["metadata"] = {key: value for key, value in settings["metadata"].items() if key != "config_source"}
    text = json.dumps(settings, default=named)
    code = sorted(code_identity(Path(source)) for source in sources if source and os.path.isfile(source))
    return hashlib.sha256(repr((text, code)).encode()).hexdigest()[:16]


def _is_library(cls: type) -> bool:
    harnesses = ("lmms_eval.api.", "lm_eval.api.")
    return cls.__module__ in ("abc", "builtins", "typing") or cls.__module__.startswith(harnesses)


def own_identity(part: Any) -> str:
    """Hash the code of a class and its parents, or of a function, that is not in this project's packages, such as a
    user's file or notebook; empty if there is none.

    Of a file the whole counts, because a method may use everything in it; of a notebook or a script, what the class or
    function does, with the functions and constants that it names."""
    parts = part.__mro__ if isinstance(part, type) else _functions_of(part)
    own = [each for each in parts if each.__module__.split(".")[0] not in NOT_OWN]
    if not own:
        return ""
    files = {each: _file_of(each.__module__) for each in own}
    whole = sorted(_file_identity(file) for file in set(files.values()) - {None})
    content = [_what_it_does(each) for each, file in files.items() if file is None]
    return hashlib.sha256(repr((whole, content)).encode()).hexdigest()[:16]


def _functions_of(value: Any) -> list[Any]:
    """Return a function, the functions that a partial is made of, or the class of any other value."""
    if not isinstance(value, partial):
        return [value if inspect.isfunction(value) else type(value)]
    return [each for part in (value.func, *value.args, *value.keywords.values()) for each in _functions_of(part)]


def _file_of(module: str) -> Path | None:
    """Return the source file of a module; None for a notebook or a script, which does much else."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if module != "__main__" and file and file.endswith(".py") and os.path.isfile(file) else None


@cache
def _file_identity(file: Path) -> str:
    """Hash a file's code, once per process: code that is already loaded does not change with its file."""
    return code_identity(file)


def _what_it_does(part: Any) -> list[list[Any]]:
    """Return the content of a class or function, and of all that its functions name of their own module."""
    ignored = ("__doc__", "__module__", "__qualname__", "__firstlineno__")
    members = vars(part) if isinstance(part, type) else {"": part}
    members, named = {name: value for name, value in members.items() if name not in ignored}, {}
    for value in members.values():
        _add_named(value, named)
    return [
        [name, _content(value), repr(getattr(value, "__defaults__", None))]
        for part in (members, named)
        for name, value in sorted(part.items())
    ]


def _add_named(value: Any, found: dict[str, Any]) -> None:
    """Add to `found` what a function, and each of that module that it calls, names of its module."""
    function = _function(value)
    code, module = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    for name in sorted(_names(code) & module.keys() - found.keys()):
        found[name] = module[name]
        if getattr(module[name], "__module__", None) == function.__module__:
            _add_named(module[name], found)


def _names(code: Any) -> set[str]:
    """Return the names in a function's bytecode and in that of the functions inside."""
    if not isinstance(code, CodeType):
        return set()
    return set(code.co_names).union(*map(_names, code.co_consts))


def _function(value: Any) -> Any:
    """Return the function of a method, a property or a decorated function; other values unchanged."""
    value = value.fget if isinstance(value, property) else value
    return inspect.unwrap(getattr(value, "__func__", value))


def _content(value: Any) -> Any:
    """Return a function's or property's bytecode without docstring, file and line numbers; plain values unchanged."""
    value = _function(value)
    code = getattr(value, "__code__", value)
    if isinstance(code, CodeType):
        doc = getattr(value, "__doc__", None)
        constants = [None if constant == doc else _content(constant) for constant in code.co_consts]
        return [code.co_code, code.co_names, constants]
    return value if isinstance(value, bool | int | float | str | tuple | None) else type(value).__name__


def fingerprint(
    cell: Cell,
    arguments: "ModelArguments",
    options: dict,
    data: dict[str, Any],
    tasks: dict[str, str],
    server: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return everything that a cell's numbers depend on. A cell on disk is complete only while this is unchanged.

    `data` and `tasks`: the identity of each task's data, and of each task itself. `server`: what the server says of the
    model that answers there.
    """
    from kvcompress.calibration.files import file_of
    from kvcompress.layer_budgets import list_layer_budgets
    from kvcompress.methods import method_name
    from kvcompress.scoring.merging import MERGES

    from ..model.input_methods import method_info

    model, calibration = Path(arguments.pretrained), options.get("calibration")
    method = method_info(cell.method).cls
    rule = list_layer_budgets().get(options.get("layer_budget") or getattr(method, "layer_budget", None))
    merge = MERGES.get(options.get("merge") or getattr(method, "merge", None))
    scorer = [] if options.get("scorer") is None else [method_info(options["scorer"]).cls]
    own = map(own_identity, [method, *scorer, type(rule), merge])
    known = calibration and file_of(calibration, method_name(options.get("scorer") or cell.method)).read_bytes()
    return {
        **asdict(cell),
        "options": options,
        "model_files": files_identity(model) if model.is_dir() else arguments.revision,
        "text_files": {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in _texts(arguments)},
        **({"calibration": hashlib.sha256(known).hexdigest()} if known else {}),
        **({"server": [server, code_identity(Path(__file__).with_name("served.py"))]} if server is not None else {}),
        "data": data,
        "tasks": tasks,
        "code": own_code(Path(__file__).parents[2]) + "".join(own),
    }


def _texts(arguments: "ModelArguments") -> list[tuple[str, Path]]:
    """Return the arguments that name a text file, with its path."""
    given = {name: str(getattr(arguments, name)) for name in ("chat_template", "system_prompt")}
    return [(name, Path(value)) for name, value in given.items() if os.path.isfile(value)]


@cache
def own_code(root: Path) -> str:
    """Hash all code between a question and its line in samples.jsonl; `root` holds both packages.

    Computed once per process: code that is already loaded does not change with its file.
    """
    plugin = root / "lmms_eval_plugins"
    cells = [file for file in sorted((plugin / "cells").rglob("*.py")) if file.name not in WITHOUT_EFFECT]
    return code_identity(root / "kvcompress", plugin / "model", plugin / "tasks", plugin / "text", *cells)
