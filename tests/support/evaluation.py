"""The words of an evaluation that is over in seconds, and commands in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOUR = ["tiny_textvqa", "tiny", "snapkv", "0.2"]


def error_line(capsys: pytest.CaptureFixture) -> str:
    """The last line of stderr."""
    return capsys.readouterr().err.strip().splitlines()[-1]


def start(module: str, *words: str, **environment: str) -> subprocess.Popen:
    """Start `python -m lmms_eval_plugins.MODULE` with these words."""
    command = [sys.executable, "-m", f"lmms_eval_plugins.{module}", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(module: str, *words: str, **environment: str) -> tuple[int, str]:
    """The exit code of a command, and what it said on stderr."""
    process = start(module, *words, **environment)
    _, said = process.communicate()
    return process.returncode, said
