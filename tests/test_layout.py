"""The rooms of the code: who imports whom, and how long a file may get."""

import ast
import graphlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvcompress", "lmms_eval_plugins", "tiny_vlm")


def files() -> dict[str, Path]:
    """Module name -> file; a package by its own name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The project's modules that a module imports, wherever in the file; an import for types alone counts too."""
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
    known = files()
    graph = {name: imports(name, path, known) for name, path in known.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(known)  # raises CycleError


def test_the_core_knows_nothing_of_the_plugin():
    known = files()
    for name, path in known.items():
        if name.startswith("kvcompress"):
            assert not {other for other in imports(name, path, known) if other.startswith("lmms_eval_plugins")}, name


def test_the_wheel_knows_nothing_of_how_the_bundled_model_was_made():
    known = files()
    for name, path in known.items():
        if not name.startswith("tiny_vlm"):
            assert not {other for other in imports(name, path, known) if other.startswith("tiny_vlm")}, name


def test_no_file_of_the_core_is_long():
    long = {path.name for name, path in files().items() if len(path.read_text().splitlines()) > 400}
    assert not long
