"""scripts/setup_env.sh, with a fake interpreter and a fake uv that only note what they were asked to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CANDIDATES = ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python3.10", "python")
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  -c*) exit {supported} ;;
  --version) echo Python 3.9 ;;
  *"pip config"*) exit 1 ;;
  "-m venv "*) echo "python $@" >> "{log}"
      mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *)  echo "python $@" >> "{log}"
      echo "the installer's own words"
      exit {install} ;;
esac
"""
FAKE_UV = """#!/bin/sh
echo "uv $@" >> "{log}"
echo "the installer's own warning" >&2
exit {install}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script and what it reads, in a path with a space."""
    checkout = tmp_path / "a checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup_env.sh", checkout / "scripts")
    (checkout / "constraints.txt").write_text("one\n")
    (checkout / "pyproject.toml").write_text("two\n")
    return checkout


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What the interpreter and uv on `search` were asked to do."""
    log = tmp_path / "log"
    fake_python(tmp_path / "bin" / "python3", log)
    fake_uv(tmp_path / "bin" / "uv", log)
    return log


def fake(path: Path, text: str, log: Path, **exits: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(log=log, **exits))
    path.chmod(0o755)


def fake_python(path: Path, log: Path, supported: int = 0, install: int = 0) -> None:
    fake(path, FAKE_PYTHON, log, supported=supported, install=install)


def fake_uv(path: Path, log: Path, install: int = 0) -> None:
    fake(path, FAKE_UV, log, install=install)


def source(checkout: Path, *search: Path, extras: str = "eval", **environment: str) -> subprocess.CompletedProcess:
    script = f'set -euo pipefail; source scripts/setup_env.sh {extras}; echo "python is $PYTHON"'
    path = os.pathsep.join([*map(str, search), "/usr/bin", "/bin"])
    return subprocess.run(
        ["bash", "-c", script], cwd=checkout, env={"PATH": path, **environment}, capture_output=True, text=True
    )


def test_makes_a_virtual_environment_once_and_installs_again_only_after_a_change(checkout, log, tmp_path):
    first = source(checkout, tmp_path / "bin")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"python is {checkout}/.venv/bin/python\n"
    made, installed = log.read_text().splitlines()
    assert made == f"python -m venv {checkout}/.venv"
    assert installed.startswith(
        f"uv pip install --compile-bytecode --python {checkout}/.venv/bin/python --constraint=constraints.txt"
    )
    assert installed.endswith("-e .[eval]")

    again = source(checkout, tmp_path / "bin")
    assert (again.returncode, again.stderr) == (0, "")
    assert len(log.read_text().splitlines()) == 2

    for changed in ("constraints.txt", "pyproject.toml"):
        (checkout / changed).write_text("changed\n")
        log.unlink()
        assert source(checkout, tmp_path / "bin").returncode == 0
        assert "uv pip install" in log.read_text()


@pytest.mark.parametrize(("command", "named"), [("bash scripts/own.sh", "scripts"), ("source scripts/own.sh", "none")])
@pytest.mark.usefixtures("log")
def test_messages_name_the_scripts_folder_only_where_a_script_was_called(command, named, checkout, tmp_path):
    own = 'source scripts/setup_env.sh eval; echo "${KVCOMPRESS_SCRIPTS:-none}"'
    (checkout / "scripts" / "own.sh").write_text(own + "\n")
    environment = {"PATH": os.pathsep.join([str(tmp_path / "bin"), "/usr/bin", "/bin"])}
    done = subprocess.run(["bash", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.stdout == f"{named}\n"


def test_another_script_adds_its_extra_and_says_so_in_one_line(checkout, log, tmp_path):
    source(checkout, tmp_path / "bin")
    added = source(checkout, tmp_path / "bin", extras="sweep")
    assert added.stderr.startswith(f"Installing kvcompress[sweep] into {checkout}/.venv")
    assert len(added.stderr.splitlines()) == 1
    assert log.read_text().splitlines()[-1].endswith("-e .[sweep,eval]")
    assert source(checkout, tmp_path / "bin", extras="eval").stderr == ""

    (checkout / "pyproject.toml").write_text("changed\n")
    source(checkout, tmp_path / "bin", extras="eval")
    assert log.read_text().splitlines()[-1].endswith("-e .[eval,sweep]")


def test_without_uv_pip_brings_it_and_where_uv_fails_pip_installs(checkout, tmp_path):
    log = tmp_path / "log"
    fake_python(tmp_path / "bin" / "python3", log)
    result = source(checkout, tmp_path / "bin")  # the fake pip brings no uv, so that calling it fails
    assert result.returncode == 0, result.stderr
    assert [line.split(" -m ")[-1].split(" --")[0] for line in log.read_text().splitlines()] == [
        f"venv {checkout}/.venv",
        "pip install",
        "pip install",
    ]
    assert log.read_text().splitlines()[-1].endswith("--constraint=constraints.txt -e .[eval]")
    assert "with pip, which takes longer" in result.stderr


@pytest.mark.usefixtures("log")
def test_no_word_of_the_installer_reaches_the_screen_but_where_it_fails(checkout, tmp_path):
    assert "the installer's own" not in source(checkout, tmp_path / "bin").stderr
    assert "the installer's own warning" in (checkout / ".venv" / "kvcompress-install.log").read_text()


def test_takes_the_active_environment_without_the_tested_releases(checkout, tmp_path):
    log = tmp_path / "log"
    fake_python(tmp_path / "active" / "bin" / "python", log)
    fake_uv(tmp_path / "bin" / "uv", log)
    result = source(checkout, tmp_path / "bin", VIRTUAL_ENV=str(tmp_path / "active"))
    assert result.stdout == f"python is {tmp_path}/active/bin/python\n"
    assert not (checkout / ".venv").exists()
    assert log.read_text() == f"uv pip install --compile-bytecode --python {tmp_path}/active/bin/python -e .[eval]\n"


def test_a_failed_install_ends_the_script_and_is_tried_again(checkout, tmp_path):
    log = tmp_path / "log"
    fake_python(tmp_path / "active" / "bin" / "python", log, install=3)
    fake_uv(tmp_path / "bin" / "uv", log, install=3)
    for attempt in (1, 2):
        result = source(checkout, tmp_path / "bin", VIRTUAL_ENV=str(tmp_path / "active"))
        assert result.returncode != 0
        assert "python is" not in result.stdout
        assert "the installer's own words" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("error: the installation failed; the full log is in ")
        assert len(log.read_text().splitlines()) == 2 * attempt  # uv, then pip


def test_no_supported_python_is_one_clear_line(checkout, tmp_path):
    for name in CANDIDATES:
        fake_python(tmp_path / "bin" / name, tmp_path / "log", supported=1)
    result = source(checkout, tmp_path / "bin")
    assert result.returncode == 1
    assert result.stderr == "error: no Python from 3.10 on found (python3 is: Python 3.9); install one\n"


def test_an_active_environment_of_another_python_is_one_clear_line(checkout, tmp_path):
    fake_python(tmp_path / "active" / "bin" / "python", tmp_path / "log", supported=1)
    result = source(checkout, VIRTUAL_ENV=str(tmp_path / "active"))
    assert result.returncode == 1
    assert result.stderr == "error: the active environment has Python 3.9, but Python 3.10 or later is needed\n"


def test_an_active_environment_of_another_checkout_is_one_clear_line_while_that_is_there(checkout, tmp_path):
    active, other = tmp_path / "active", tmp_path / "an other"
    fake_python(active / "bin" / "python", tmp_path / "log")
    (other / "kvcompress").mkdir(parents=True)
    (active / ".kvcompress-installed").write_text(f"{other} 123 45\neval\n")
    result = source(checkout, VIRTUAL_ENV=str(active))
    assert result.returncode == 1
    said = f"error: the active environment {active} has kvcompress of {other}: deactivate it, or activate another\n"
    assert result.stderr == said
    (other / "kvcompress").rmdir()
    assert source(checkout, VIRTUAL_ENV=str(active)).returncode == 0
