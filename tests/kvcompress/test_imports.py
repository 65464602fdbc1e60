"""What is imported, counted in a process of its own: seconds differ from machine to machine, modules do not."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvcompress
from kvcompress.__main__ import commands

HEAVY = ("torch", "transformers", "lmms_eval", "pandas", "matplotlib", "datasets", "sklearn", "scipy")
TELL = f"""
import json, sys
def tell(ran):
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    print(json.dumps([ran, len(sys.modules), heavy]), file=sys.__stdout__)
"""
# What a slip of the fingers is answered with, or that asks for words alone.
QUICK = [
    [],
    ["--help"],
    ["--version"],
    ["evl"],
    ["eval", "--help"],
    ["eval", "--limt", "3"],
    ["eval", "tiny_textvqa", "tiny", "snapvk", "0.2"],
    ["eval", "tiny_textvqq", "tiny", "snapkv", "0.2"],
    ["list", "methds"],
    *([command, "--no-such-flag"] for command in commands() if command not in ("check", "eval", "list")),
]


def modules_after(code: str) -> list:
    """What the process tells: a list for each call of `tell`."""
    found = subprocess.run([sys.executable, "-c", TELL + code], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("[")]


def test_importing_the_package_imports_nothing_heavy():
    [[_, count, heavy]] = modules_after("import kvcompress; tell('import')")
    assert heavy == []
    assert count < 400


def test_what_a_command_line_gets_wrong_is_answered_without_anything_heavy():
    told = modules_after(
        "import contextlib, io\n"
        "from kvcompress.__main__ import main\n"
        f"for words in {QUICK!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        try: main(words)\n"
        "        except SystemExit: pass\n"  # argparse's, after --help
        "    tell(words)"
    )
    assert [words for words, _, _ in told] == QUICK
    for words, count, heavy in told:
        assert heavy == [], words
        assert count < 800, words


def test_listing_the_methods_imports_torch_but_not_transformers():
    told = modules_after("from kvcompress.__main__ import main; main(['list', 'methods']); tell('list')")
    assert told[-1][2] == ["torch"]


@pytest.mark.parametrize("name", kvcompress.__all__)
def test_what_the_package_names_is_there(name):
    assert getattr(kvcompress, name) is not None
    assert name in dir(kvcompress)


def test_type_checkers_find_each_name_where_it_is_imported_from_later():
    tree = ast.parse(Path(kvcompress.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and node.test.id == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == kvcompress._LATER


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        kvcompress.nonesuch  # noqa: B018
    assert not hasattr(kvcompress, "_nonesuch")
