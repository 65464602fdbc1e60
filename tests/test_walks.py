"""The pages that walk through the code: what they name is there, and is called in their order."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvcompress
from lmms_eval_plugins.evaluate import main
from tests.support.docs import DOCS, ROOT, code_blocks
from tests.support.families import FAMILIES

QUESTION = DOCS / "life-of-a-question.md"
KEY = DOCS / "life-of-a-key.md"


def steps_of(page: Path) -> list[tuple[str, str]]:
    """The file and the qualified name of each function of a page's numbered list."""
    listed = re.findall(r"^\d+\. \[[^]]+\]\(([^)]+)\) `([\w.]+)`", page.read_text("utf-8"), re.MULTILINE)
    return [(str((DOCS / file).resolve()), name) for file, name in listed]


def in_order_of_first_calls(steps: list[tuple[str, str]], run: Callable[[], object]) -> list[tuple[str, str]]:
    """Those of the steps that `run` calls."""
    files, called = {file for file, _ in steps}, {}

    def note(frame, event, argument) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            given = frame.f_locals
            owner = given.get("cls") or type(given.get("self"))  # a name such as `update` is that of several
            for name in [frame.f_code.co_name, *(f"{base.__name__}.{frame.f_code.co_name}" for base in owner.__mro__)]:
                called.setdefault((frame.f_code.co_filename, name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [step for step in called if step in steps]


@pytest.mark.slow
def test_a_question_takes_the_steps_of_its_page_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (command,) = code_blocks(QUESTION, "bash")
    steps = steps_of(QUESTION)
    assert in_order_of_first_calls(steps, lambda: main(command.split()[1:])) == steps


def test_a_key_takes_the_steps_of_its_page_in_their_order():
    family = FAMILIES["qwen2"]
    model, inputs = family.build(2), family.inputs(family.build(2), lengths=[40])

    def generate() -> None:
        with kvcompress.compress(model, "snapkv", budget=12, decode_budget=12, decode_interval=2, window_size=4):
            model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)

    steps = steps_of(KEY)
    assert in_order_of_first_calls(steps, generate) == steps


def test_a_question_crosses_eight_files_as_its_page_says():
    assert "crosses the eight files" in QUESTION.read_text("utf-8")
    assert len({file for file, _ in steps_of(QUESTION)}) == 8


def test_every_class_and_method_that_the_walk_of_a_key_names_is_there():
    members = {}
    for path in (ROOT / "kvcompress").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                functions = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                annotated = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
                members.setdefault(node.name, set()).update(functions | annotated)
    page = KEY.read_text("utf-8")
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", page)
    files = re.findall(r"`((?:hooks|cache|clusters|scoring|kernels|policy)/[\w/.]*)`", page)
    assert len(named) > 5 < len(files)
    assert [f"{owner}.{name}" for owner, name in named if name not in members.get(owner, ())] == []
    assert [file for file in files if not (ROOT / "kvcompress" / file).exists()] == []
