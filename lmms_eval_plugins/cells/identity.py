"""Fingerprint everything that a cell's numbers depend on: the model's files, the data, the code."""

import ast
import contextlib
import hashlib
import inspect
import json
import os
from dataclasses import asdict, is_dataclass
from functools import cache
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


def class_identity(cls: type, but_packages: tuple[str, ...]) -> str:
    """Hash what a class does in code outside of `but_packages`, such as a user's file or notebook. Empty if it and its
    parents are all defined in those packages."""
    own = [each for each in cls.__mro__ if each.__module__.split(".")[0] not in (*but_packages, "builtins", "abc")]
    if not own:
        return ""
    ignored = ("__doc__", "__module__", "__qualname__", "__firstlineno__")
    content = [
        [name, _content(value), repr(getattr(value, "__defaults__", None))]
        for each in own
        for name, value in sorted(vars(each).items())
        if name not in ignored
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _content(value: Any) -> Any:
    """Return a function's or property's bytecode without docstring, file and line numbers; plain values unchanged."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
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

    from ..model.input_methods import method_info

    model, calibration = Path(arguments.pretrained), options.get("calibration")
    method = method_info(cell.method).cls
    rule = list_layer_budgets().get(options.get("layer_budget") or getattr(method, "layer_budget", None))
    own = [class_identity(cls, but_packages=("kvcompress", "lmms_eval_plugins")) for cls in (method, type(rule))]
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
