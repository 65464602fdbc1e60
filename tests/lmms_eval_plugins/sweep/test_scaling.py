"""The files of docs/sweeps.md: they parse, and what they call exists."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.sweep.__main__ import parser

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "scaling"


def test_the_page_links_every_file_and_no_other():
    page = (ROOT / "docs" / "sweeps.md").read_text()
    linked = re.findall(r"^\[.+\]: scaling/([\w.]+)$", page, re.MULTILINE)
    assert set(linked) == {path.name for path in FOLDER.iterdir()}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.sbatch")), ids=lambda path: path.name)
def test_a_slurm_file_is_bash_whose_directives_slurm_reads(path):
    subprocess.run(["bash", "-n", path], check=True)
    lines = path.read_text().splitlines()
    first_command = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [at for at, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/bash"
    assert directives
    assert max(directives) < first_command


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_a_kubernetes_file_is_a_job_that_calls_a_command_which_exists(path):
    documents = list(yaml.safe_load_all(path.read_text()))
    (job,) = [document for document in documents if document["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    command = container["command"]
    if command[0] == "wandb":
        assert command == ["wandb", "agent", "$(SWEEP)"]
    elif command[0] == "ray":
        command = command[command.index("--") + 1 :]
        assert command[:4] == ["python", "-m", "lmms_eval_plugins.sweep", "run"]
        flags = parser().parse_intermixed_args(command[4:])
        assert (ROOT / flags.config).is_file()
        assert f"--address={flags.ray}" in container["command"]
        names = {document["metadata"]["name"] for document in documents}
        assert flags.ray == f"{job['metadata']['name']}-0.{pod['subdomain']}:6379"
        assert pod["subdomain"] in names
    else:
        assert command[:3] == ["python", "-m", "lmms_eval_plugins.evaluate"]
        assert parse(command[3:]).methods == ["full", "snapkv"]
