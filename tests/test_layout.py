"""The rooms of the code: who imports whom, and how long a file may get."""

import ast
import functools
import graphlib
import re
from pathlib import Path

from tests.ordinary import LIST

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvcompress", "lmms_eval_plugins", "tiny_vlm")


@functools.cache
def files() -> dict[str, Path]:
    """Module name -> file; a package by its own name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def imports(name: str) -> set[str]:
    """The project's modules that a module imports, wherever in the file; an import for types alone counts too."""
    known, path = files(), files()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # A name of a package may be a module; else the package's own __init__ is what is meant.
            found |= {f"{module}.{alias.name}" if f"{module}.{alias.name}" in known else module for alias in node.names}
    return (found & known.keys()) - {name}


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: imports(name) for name in files()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(graph)  # raises CycleError


def test_the_core_knows_nothing_of_the_plugin():
    for name in files():
        if name.startswith("kvcompress"):
            assert not {other for other in imports(name) if other.startswith("lmms_eval_plugins")}, name


def test_the_wheel_knows_nothing_of_how_the_bundled_model_was_made():
    for name in files():
        if not name.startswith("tiny_vlm"):
            assert not {other for other in imports(name) if other.startswith("tiny_vlm")}, name


def test_drawing_leaves_a_notebooks_matplotlib_as_it_was():
    """pyplot has a backend and a list of figures for the whole process; `Figure` has neither."""
    for name, path in files().items():
        text = path.read_text(encoding="utf-8")
        assert "pyplot" not in text, name
        assert "matplotlib.use" not in text, name


def test_no_file_of_the_core_is_long():
    long = {path.name for name, path in files().items() if len(path.read_text().splitlines()) > 400}
    assert not long


def test_every_test_that_the_ordinary_run_leaves_out_exists():
    for line in LIST.read_text(encoding="utf-8").split():
        path, _, test = line.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {test or 'test_'}", text, re.MULTILINE), line
