"""scripts/run_eval.sh and its siblings: hand their arguments and the exit code through, from any folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path):
    """An active virtual environment whose python does the real one's work, but installs nothing and keeps a log; where
    ONLY_INSTALL is set, it starts no command."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    log = tmp_path / "python.log"
    python.write_text(
        f'#!/bin/sh\nprintf "%s|" "$@" >> {log}\necho >> {log}\n'
        f'case "$ONLY_INSTALL$*" in *"pip install"*|yes*lmms_eval_plugins*) exit 0;; esac\nexec {sys.executable} "$@"\n'
    )
    uv = python.with_name("uv")
    uv.write_text(f'#!/bin/sh\nprintf "%s|" uv "$@" >> {log}\necho >> {log}\n')
    for program in (python, uv):
        program.chmod(0o755)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": path}, log


def run_eval(environment, *arguments, cwd=ROOT, script=ROOT / "scripts" / "run_eval.sh"):
    return subprocess.run([script, *arguments], env=environment[0], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("script", "words", "command", "said"),
    [
        ("run_eval", ["a task", "tiny", "snapkv", "7", "--limit", "2"], "evaluate", "RATIO 7 is not in (0, 1]"),
        ("run_sweep", ["a sweep.yaml", "--trials", "0"], "sweep|run", "argument --trials: '0' is not a whole number"),
        ("reproduce", ["tiny", "--only", "a b"], "reproduce", "'a b'"),
    ],
)
def test_arguments_and_exit_code_pass_through(script, words, command, said, environment, tmp_path):
    done = run_eval(environment, *words, cwd=tmp_path, script=ROOT / "scripts" / f"{script}.sh")
    assert done.returncode == 2
    assert re.match(rf"error: .*{re.escape(said)}", done.stderr.splitlines()[-1])
    assert f"-m|lmms_eval_plugins.{command}|{'|'.join(words)}|" in environment[1].read_text()


def test_requirements_are_installed_once_and_again_when_they_change(environment, tmp_path):
    environment[0]["ONLY_INSTALL"] = "yes"
    for name in ("scripts", "lmms_eval_plugins"):
        shutil.copytree(
            ROOT / name, tmp_path / "clone" / name, ignore=shutil.ignore_patterns("checkpoint", "*.parquet")
        )
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    for times in (1, 1, 2):
        if times == 2:
            with open(tmp_path / "clone" / "constraints.txt", "a") as file:
                file.write("\n# changed\n")
        run_eval(environment, "a", "tiny", "snapkv", "7", script=tmp_path / "clone" / "scripts" / "run_eval.sh")
        assert environment[1].read_text().count("uv|pip|install") == times


@pytest.mark.parametrize(
    ("script", "usage"),
    [("run_eval", "TASK MODEL METHOD RATIO [flags] [key=value ...]"), ("run_sweep", "CONFIG [flags] [parameter=value")],
)
def test_help_shows_the_usage(script, usage, environment):
    done = run_eval(environment, "--help", script=ROOT / "scripts" / f"{script}.sh")
    assert done.returncode == 0
    assert usage in done.stdout
