"""docs/reproduce-a-baseline.md: each command gives the score stated after it."""

import re
import shlex
from pathlib import Path

import pytest

from lmms_eval_plugins.evaluate import main
from tests.support.docs import DOCS, ROOT, code_blocks

PAGE = DOCS / "reproduce-a-baseline.md"
CLOSE = 6.0  # points: where the last bit decides, another machine answers a few questions of 40 to 100 otherwise
COMMANDS = [
    re.fullmatch(r"\./scripts/run_eval\.sh (.*\S) +# (\d+\.\d)", line).groups()
    for block in code_blocks(PAGE, "bash")[1:]
    for line in block.splitlines()
]


def test_each_of_the_twelve_ways_has_a_command():
    ways = re.split(r"^\*\*(\d+)\. ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert ways[1::2] == [str(way) for way in range(1, 13)]
    assert all("```bash" in way for way in ways[2::2])


@pytest.mark.slow
@pytest.mark.parametrize(("words", "score"), COMMANDS, ids=[words for words, _ in COMMANDS])
def test_a_command_gives_the_score_behind_it(words, score, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("lmms_eval_plugins").symlink_to(ROOT / "lmms_eval_plugins")
    Path("worded").mkdir()
    Path("worded/worded.yaml").write_text(code_blocks(PAGE, "yaml")[0])
    Path("bare.jinja").write_text(re.search(r"^{% .*", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[0])
    assert main(shlex.split(words)) == 0
    (row,) = re.findall(r"^│.* (\d+\.\d) ± ", capsys.readouterr().out, flags=re.MULTILINE)
    assert float(row) == pytest.approx(float(score), abs=CLOSE)
