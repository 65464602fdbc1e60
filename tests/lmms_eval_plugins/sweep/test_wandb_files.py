"""What a sweep leaves for wandb: its offline runs hold the results, and give them back."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import wandb
import yaml

from kvcompress.__main__ import main
from lmms_eval_plugins.cells import cell_log
from lmms_eval_plugins.sweep import __main__ as command
from tests.support.wandb_files import read_runs

pytestmark = pytest.mark.slow
SWEEP = {
    "method": "grid",
    "parameters": {
        "task": {"value": "tiny_textvqa"},
        "model": {"value": "tiny"},
        "method": {"values": ["full", "snapkv"]},
        "ratio": {"values": [0.5, 0.2]},
        "window_size": {"value": 8},
    },
}
API_KEY = "local" + 40 * "0"  # of openwandb's first user


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The results folder of a real sweep of four trials, run offline; `full` at two ratios is one cell."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder / "home"))
        patch.delenv("WANDB_MODE", raising=False)
        wandb.teardown()
        assert command.main(["run", "sweep.yaml", "--limit", "4"]) == 0
        wandb.teardown()
    return folder / "results"


@pytest.fixture(scope="module")
def runs(sweep):
    return read_runs(sweep / "sweeps" / "sweep-limit=4")


def test_each_trial_is_a_run_with_the_values_of_its_results(sweep, runs):
    settings = [(method, ratio) for method in ("full", "snapkv") for ratio in (0.5, 0.2)]
    assert sorted((run["config"]["method"], run["config"]["ratio"]) for run in runs) == sorted(settings)
    for run in runs:
        assert {name: run["config"][name] for name in ("task", "model")} == {"task": "tiny_textvqa", "model": "tiny"}
        assert run["exit"] == 0
        cell = json.loads((Path(run["config"]["results"]) / "results.json").read_text())
        assert run["config"]["protocol"] == cell["protocol"]
        values = cell_log.cell_values(cell)
        assert values["accuracy"] == cell["results"]["tiny_textvqa"]["exact_match,none"]
        for logged in (run["summary"], *run["history"]):
            assert {name: logged[name] for name in values} == pytest.approx(values)
        assert len(run["history"]) == 1


def test_artifacts_that_are_put_into_one_folder_make_a_results_folder(sweep, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    artifacts = {}
    for run in runs:
        (artifact,) = run["artifacts"]
        assert artifact["type"] == "results"
        assert re.fullmatch(r"[\w.-]{1,128}", artifact["name"])
        artifacts[artifact["name"]] = artifact["files"]
    assert len(artifacts) == 3  # the full cache at two ratios is one cell
    for files in artifacts.values():
        for name, stored in files.items():
            target = tmp_path / "results" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(stored, target)
    assert main(["report", "results"]) == 0
    assert len((tmp_path / "results" / "report" / "cells.csv").read_text().splitlines()) == 1 + 3
    assert main(["leaderboard", "--check", "results"]) == 0
    assert main(["leaderboard", "results"]) == 0
    assert "(3 rows in 1 table," in capsys.readouterr().out


@pytest.fixture
def server(tmp_path):
    """openwandb, a server that speaks wandb's protocol; where it is not installed, the test is skipped."""
    program = shutil.which("openwandb")
    if program is None:
        pytest.skip("no openwandb on PATH (pip install openwandb, in an environment of its own)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    host, port = address.split(":")
    arguments = [program, "serve", "--host", host, "--port", port, "--data-dir", tmp_path / "server"]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                try:
                    urlopen(f"http://{address}/login").close()
                    break
                except URLError:
                    time.sleep(0.2)
            yield f"http://{address}", tmp_path / "server" / "files"
        finally:
            process.terminate()


def test_offline_runs_are_synced_to_a_server(sweep, runs, server, tmp_path):
    """Without the artifacts: openwandb 0.5 does not take wandb 0.25's."""
    address, files = server
    copies = tmp_path / "runs"
    shutil.copytree(sweep / "sweeps" / "sweep-limit=4" / "wandb", copies)  # sync marks what it has uploaded
    environment = {**os.environ, "WANDB_BASE_URL": address, "WANDB_API_KEY": API_KEY, "HOME": str(tmp_path)}
    environment.pop("WANDB_MODE", None)
    arguments = [sys.executable, "-m", "wandb", "sync", *sorted(copies.glob("offline-run-*"))]
    subprocess.run(arguments, env=environment, check=True, cwd=tmp_path)
    for run in runs:
        (folder,) = files.rglob(run["id"])
        summary = json.loads((folder / "wandb-summary.json").read_text())
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert {name: summary[name] for name in cell_log.METRICS} == pytest.approx(
            {name: run["summary"][name] for name in cell_log.METRICS}
        )
        for name in ("task", "model", "method", "ratio", "protocol"):
            assert config[name]["value"] == run["config"][name]
