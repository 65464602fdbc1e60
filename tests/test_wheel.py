"""What `pip install kvcompress` brings: the wheel, in an environment of its own, away from the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvcompress

ROOT = Path(__file__).parents[1]
SHIPPED = ("kvcompress", "lmms_eval_plugins", "configs", "pyproject.toml", "README.md", "LICENSE")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """The folder with a source distribution, and a wheel that was built from it."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, checkout / name)
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", checkout], check=True, capture_output=True)
    return checkout / "dist"


@pytest.fixture(scope="module")
def command(dist, tmp_path_factory) -> Path:
    """The console command of the wheel in a fresh environment, over the dependencies of this one."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", wheel]
    subprocess.run(install, check=True)
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    (packages / "below.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin" / "kvcompress"


def run(command: Path, folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_wheel_has_what_is_compiled_where_it_runs(dist):
    (wheel,) = dist.glob("*.whl")
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kvcompress" / "kernels").glob("*.[ch]*")}
    assert {"kvcompress/kernels/turboquant.cpp", "kvcompress/kernels/vectors.h"} <= sources
    assert sources <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_is_what_runs(command, tmp_path):
    python = command.with_name("python")
    script = "import kvcompress, lmms_eval_plugins; print(kvcompress.__file__, lmms_eval_plugins.__file__)"
    found = run(python, tmp_path, "-c", script).split()
    assert all(Path(each).is_relative_to(command.parents[1]) for each in found)
    assert run(command, tmp_path, "--version") == f"kvcompress {kvcompress.__version__}\n"


def test_the_demo_runs_from_the_wheel(command, tmp_path):
    table = run(command, tmp_path, "eval", "--limit", "4")
    assert "streamingllm" in table
    assert list((tmp_path / "results").iterdir())
    assert list(tmp_path.iterdir()) == [tmp_path / "results"]


def test_shipped_grids_are_found_by_name(command, tmp_path):
    assert "TextVQA" in run(command, tmp_path, "reproduce", "effivlm_bench", "--dry-run")
    run(command, tmp_path, "sweep", "demo", "--trials", "1", "--limit", "2")
    assert "snapkv" in run(command, tmp_path, "list", "methods", "snapkv")


def test_the_source_distribution_holds_what_the_wheel_is_made_of(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "kvcompress", "lmms_eval_plugins", "configs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    missing = {name for name in tracked.stdout.splitlines() if name not in names}
    assert not {name for name in missing if not name.startswith("configs/") and name != "lmms_eval_plugins/configs"}
    assert {f"lmms_eval_plugins/{name}" for name in missing if name.startswith("configs/")} <= names
