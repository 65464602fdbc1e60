"""What a cell's numbers depend on: the model's files, the data, the code."""

import ast
import hashlib
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from .results import Cell

if TYPE_CHECKING:
    from ..model.arguments import ModelArguments


def files_identity(path: Path) -> list[list]:
    """[name, bytes, modification time in ns] of a local checkpoint's files: changes when it is replaced."""
    stats = [(file.relative_to(path), file.stat()) for file in sorted(path.rglob("*")) if file.is_file()]
    return [[str(name), stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def code_identity(*packages_or_files: Path) -> str:
    """Hash of Python sources without comments and formatting, so that only a real change redoes a cell."""
    digest = hashlib.sha256()
    for path in packages_or_files:
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(source.name.encode())
            digest.update(ast.dump(ast.parse(source.read_text(encoding="utf-8"))).encode())
    return digest.hexdigest()[:16]


def class_identity(cls: type, but_packages: tuple[str, ...]) -> str:
    """Hash of what a class does, where it and its parents are defined outside of some packages: in a notebook or a file
    of one's own. Empty where none is."""
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
    """A function's or property's instructions, without file names and line numbers; plain values as they are."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", value)
    if isinstance(code, CodeType):
        return [code.co_code, code.co_names, [_content(constant) for constant in code.co_consts]]
    return value if isinstance(value, bool | int | float | str | tuple | None) else type(value).__name__


def fingerprint(cell: Cell, arguments: "ModelArguments", options: dict, data: dict[str, Any]) -> dict[str, Any]:
    """What a cell's numbers depend on: a cell on disk counts only while all of it is the same."""
    import kvcompress

    model = Path(arguments.pretrained)
    texts = [Path(name) for name in (arguments.chat_template, arguments.system_prompt) if name and os.path.isfile(name)]
    method = kvcompress.list_methods()[cell.method].cls
    return {
        **asdict(cell),
        "options": options,
        "model_files": files_identity(model) if model.is_dir() else arguments.revision,
        "data": data,
        **({"prompt_files": [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in texts]} if texts else {}),
        "code": _own_code() + class_identity(method, but_packages=("kvcompress", "lmms_eval_plugins")),
    }


@cache
def _own_code() -> str:
    """Of everything between a question and its answer. Once per process: what is loaded does not change with a file."""
    plugin = Path(__file__).parents[1]
    return code_identity(plugin.parent / "kvcompress", plugin / "model")
