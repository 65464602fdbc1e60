"""The pages that walk through the code: what they name is there, and is called in their order."""

import re
import sys
from pathlib import Path

from lmms_eval_plugins.evaluate import main
from tests.support.docs import DOCS, ROOT, code_blocks

QUESTION = DOCS / "life-of-a-question.md"
KEY = DOCS / "life-of-a-key.md"
STEPS = [
    ((DOCS / file).resolve(), name)
    for file, name in re.findall(r"^\d+\. \[[^]]+\]\(([^)]+)\) `([\w.]+)`", QUESTION.read_text("utf-8"), re.MULTILINE)
]


def test_a_question_takes_the_steps_of_its_page_in_their_order(tmp_path, monkeypatch, capsys):
    files, last = {str(file) for file, _ in STEPS}, [(str(file), name.split(".")[-1]) for file, name in STEPS]
    called: dict[tuple[str, str], None] = {}  # by their first calls

    def note(frame, event, argument) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            called.setdefault((frame.f_code.co_filename, frame.f_code.co_name))

    monkeypatch.chdir(tmp_path)
    (command,) = code_blocks(QUESTION, "bash")
    sys.setprofile(note)
    try:
        assert main(command.split()[1:]) == 0
    finally:
        sys.setprofile(None)
    assert [step for step in called if step in last] == last


def test_the_page_counts_the_files_that_a_question_crosses():
    numbers = {"fourteen": 14, "thirteen": 13, "twelve": 12, "eleven": 11, "ten": 10, "nine": 9, "eight": 8}
    (word,) = re.findall(r"crosses the (\w+) files", QUESTION.read_text("utf-8"))
    assert numbers[word] == len({file for file, _ in STEPS})


def test_every_class_and_method_that_the_walk_of_a_key_names_is_there():
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "kvcompress").rglob("*.py"))
    for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)`", KEY.read_text("utf-8")):
        assert f"class {owner}" in code, owner
        assert re.search(rf"def {name}\b|^    {name}\b", code, re.MULTILINE), f"{owner}.{name}"
    for file in re.findall(r"`((?:hooks|cache|clusters|scoring|kernels|policy)/[\w/.]*)`", KEY.read_text("utf-8")):
        assert Path(ROOT / "kvcompress" / file).exists(), file
