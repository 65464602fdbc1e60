"""scripts/setup_env.sh, with a fake interpreter that only notes what it was asked to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CANDIDATES = ("python3", "python3.12", "python3.11", "python3.10", "python")
FAKE_PYTHON = """#!/bin/sh
case "$1" in
  -c) exit {supported} ;;
  --version) echo Python 9.9 ;;
  *)  echo "$@" >> "{log}"
      [ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
      exit {install} ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script and what it reads, in a path with a space."""
    checkout = tmp_path / "a checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup_env.sh", checkout / "scripts")
    (checkout / "requirements.txt").write_text("one\n")
    (checkout / "pyproject.toml").write_text("two\n")
    return checkout


def fake_python(path: Path, log: Path, supported: int = 0, install: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE_PYTHON.format(log=log, supported=supported, install=install))
    path.chmod(0o755)


def source(checkout: Path, *search: Path, **environment: str) -> subprocess.CompletedProcess:
    script = 'set -euo pipefail; source scripts/setup_env.sh; echo "python is $PYTHON"'
    path = os.pathsep.join([*map(str, search), "/usr/bin", "/bin"])
    return subprocess.run(
        ["bash", "-c", script], cwd=checkout, env={"PATH": path, **environment}, capture_output=True, text=True
    )


def test_makes_a_virtual_environment_once_and_installs_again_only_after_a_change(checkout, tmp_path):
    log = tmp_path / "log"
    fake_python(tmp_path / "bin" / "python3", log)
    first = source(checkout, tmp_path / "bin")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"python is {checkout}/.venv/bin/python\n"
    made, installed = log.read_text().splitlines()
    assert made == f"-m venv {checkout}/.venv"
    assert installed.startswith("-m pip install")
    assert installed.endswith("-r requirements.txt")

    again = source(checkout, tmp_path / "bin")
    assert (again.returncode, again.stderr) == (0, "")
    assert len(log.read_text().splitlines()) == 2

    for changed in ("requirements.txt", "pyproject.toml"):
        (checkout / changed).write_text("changed\n")
        log.unlink()
        assert source(checkout, tmp_path / "bin").returncode == 0
        assert "pip install" in log.read_text()


def test_takes_the_active_environment(checkout, tmp_path):
    log = tmp_path / "log"
    fake_python(tmp_path / "active" / "bin" / "python", log)
    result = source(checkout, VIRTUAL_ENV=str(tmp_path / "active"))
    assert result.stdout == f"python is {tmp_path}/active/bin/python\n"
    assert not (checkout / ".venv").exists()
    assert "venv" not in log.read_text()


def test_a_failed_install_ends_the_script_and_is_tried_again(checkout, tmp_path):
    log = tmp_path / "log"
    fake_python(tmp_path / "active" / "bin" / "python", log, install=3)
    for _ in range(2):
        result = source(checkout, VIRTUAL_ENV=str(tmp_path / "active"))
        assert result.returncode != 0
        assert "python is" not in result.stdout
    assert len(log.read_text().splitlines()) == 2


def test_no_supported_python_is_one_clear_line(checkout, tmp_path):
    for name in CANDIDATES:
        fake_python(tmp_path / "bin" / name, tmp_path / "log", supported=1)
    result = source(checkout, tmp_path / "bin")
    assert result.returncode == 1
    assert result.stderr == "error: no Python 3.10 to 3.12 found (python3 is: Python 9.9); install one\n"


def test_an_active_environment_of_another_python_is_one_clear_line(checkout, tmp_path):
    fake_python(tmp_path / "active" / "bin" / "python", tmp_path / "log", supported=1)
    result = source(checkout, VIRTUAL_ENV=str(tmp_path / "active"))
    assert result.returncode == 1
    assert result.stderr == "error: the active environment has Python 9.9, but Python 3.10 to 3.12 is needed\n"
