"""docs/first-hour.md: its instructions are followed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs import DOCS, code_blocks

PAGE = DOCS / "first-hour.md"
pytestmark = pytest.mark.slow


def test_every_command_of_the_first_hour_does_what_the_page_says(tmp_path):
    (tmp_path / "value_norm.py").write_text(code_blocks(PAGE, "python")[0])
    (tmp_path / "window.yaml").write_text(code_blocks(PAGE, "yaml")[0])
    # The commands of the interpreter that runs the tests, from a folder that is no checkout.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    script = "set -euo pipefail\n" + "\n".join(code_blocks(PAGE, "bash")[1:])  # without Install
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]

    cells = {folder.name for folder in (tmp_path / "results" / "tiny_textvqa" / "tiny").iterdir() if folder.is_dir()}
    assert sum(name.startswith("value-norm") for name in cells) == 3 + 3
    assert sum(name.startswith("snapkv") for name in cells) == 3
    assert "paired bootstrap" in done.stdout
    tables = (tmp_path / "results" / "report" / "tables.tex").read_text()
    assert "value-norm" in tables
    assert r"\toprule" in tables
    assert "value-norm" in (tmp_path / "leaderboard.html").read_text()
    assert "complete and plausible" in done.stdout + done.stderr
