"""Every shell command of the README and of the documentation is read by its parser, and run where it can be.

RUN and NOT_RUN say of each which: a command that is in neither, or in two places, fails with its page and line.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from kvcompress import layer_budgets, methods
from tests.support.calibrations import calibration_file
from tests.support.docs import DOCS, ROOT, Command, code_blocks, shell_commands
from tests.support.families import FAMILIES
from tests.support.parse_only import check, script_module

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), ROOT / "benchmarks" / "README.md"]
COMMANDS = [command for page in PAGES for command in shell_commands(page)]
OWN_METHOD = ("adding-a-method", "first-hour")  # pages whose first block of Python is the method value-norm
FILES = ("photo.jpg", "book.txt", "full_attention_heads.tsv", "questions.jsonl", "bare.jinja")

FEW = "--limit 2"
SHORT = "--lengths 64 --batches 1 --new 3 --repeats 1"
SHORT_ANSWERS = "--requests 3 --prompt 24 --answers 2 4"
# Part of `page:line: command` -> what is appended to the command when it is run, so that it is short: of a flag that is
# given twice the last counts.
RUN = {
    r": \./scripts/run_eval\.sh$": FEW,
    r"^(?!docs/reproduce-a-baseline|.*--server).*run_eval\.sh (tiny_textvqa|tiny_read_all|TASK) ": FEW,
    r"run_eval\.sh textvqa_val (tiny|MODEL) (?!.*overlays)": FEW,
    r"run_eval\.sh textvqa_val MODEL .*overlays": f"{FEW} --overlays 1",
    r"run_eval\.sh list ": "",
    r"kvcompress eval tiny_textvqa tiny value-norm,snapkv": FEW,
    r"adding-a-method\S+ export ": "",
    r"bench --shape smollm2-135m --methods snapkv adakv tova ": SHORT,
    r"bench throughput --shape smollm2-135m$": SHORT_ANSWERS,
    r"bench launches --shape smollm2-135m$": "--length 32 --new 5 --methods snapkv",
    r"calibrate tiny ": "--questions 2",
    r"kvcompress export ": "",
    r"-m kvcompress show photo\.jpg": "",
    r"adding-a-method\S+ kvcompress check ": "",
    r"-m kvcompress (report (?!speech)|leaderboard )": "",
    r": tar ": "",
    r"^docs/(?!first-hour).*kvcompress metrics results": "",
    r"kvcompress table results": "",
    r"kvcompress long-pack ": "--lengths 2,4 --questions 1",
    r"reproduce\.sh \w+ --dry-run": "",
    r"reproduce\.sh tiny --limit 16": FEW,
    r"run_sweep\.sh configs/sweeps/demo\.yaml$": FEW,
    r"run_sweep\.sh configs/sweeps/random\.yaml": f"{FEW} --trials 3",
    r"tiny_vlm\.dataset --as-textvqa": "",
    r"tests\.fuzz$": "--configurations 3",
    r"benchmarks\.ragged_decode --threads": "--repeats 1 --prompt 64",
    r"benchmarks\.kernels --threads": "--lengths 64 --repeats 1",
    r"benchmarks\.static_decode --threads": "--layers 2 --prompt 32 --new 8 --rounds 1",
    r"benchmarks\.latency --threads": (
        "--layers 2 --slots 2 --prompt 24 --answers 2 4 --pieces 8 --batch-tokens 64 --methods full --entries 8"
    ),
    r"benchmarks\.eval_throughput --limit": FEW,
    r"benchmarks\.methods_figure": "--out figure.png",
}
# Why the others are not run; their words are read all the same.
NOT_RUN = {
    "a model of the hub": r"Qwen/|llava-hf/|meta-llama/|Qwen__|--only model=",
    "data of the hub": r"seedbench|gsm8k|niah_single|--task textvqa_val|longbench_qasper|lmms-lab-encoder/",
    "a GPU": r"--device cuda|bench_gpu\.sh --stage \d$|pytest -m gpu|tests\.gpu\.pretended",
    "an account of wandb": r": wandb ",
    "a Ray cluster, which test_ray_cluster.py starts": r"--ray ",
    "a model of text only, and a book": r"kvcompress (calibrate|train \w+) MODEL .*--text",
    "a model of text only, which test_instructions.py asks": r"run_eval\.sh several_instructions",
    "it installs": r": (\.venv/bin/)?pip |: python3 -m venv|test_(pythons|versions|openvino|engines)\.sh|lock\.sh",
    "a server, which serve/test_command.py and lmms_eval_plugins/test_server.py start": (
        r"kvcompress serve |: curl |--server "
    ),
    "it is the tests": r"run_tests\.sh|pytest tests|tests\.(contents|mutate|lines_run)",
    "it writes into this repository": (
        r"tests\.(methods_page|family_table)|tiny_vlm\.(dataset|presence)$|regimes\.dataset|--write-reference|"
        r"tasks\.instructions$|benchmarks\.fidelity"
    ),
    "a repository of others": r"git clone|oracle\.authors",
    "test_wheel.py builds": r": python -m build",
    "test_first_hour.py runs it": r"^docs/first-hour\.md",
    "test_baseline_page.py runs it": r"^docs/reproduce-a-baseline\.md.*run_eval\.sh (tiny|worded)",
    "answers to generated tasks": r"results/long_|kvcompress heatmap results/<",
    "long: some minutes, which bench/test_speech.py runs shorter": r"kvcompress speech OMNI",
    "long: a training": r"tiny_vlm\.train",
    "long: seven billion numbers": r"bench launches --shape qwen2-7b",
    "long: some minutes to hours": r"benchmarks\.(method_table|leaderboard|bytes_front)|--stage 1 --smoke",
    "long: one of many tasks, which test_official_tasks.py runs": r"--data-root data batch_size=3",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def ways(command: Command) -> list[str]:
    """The patterns of RUN that a command has."""
    return [pattern for pattern in RUN if re.search(pattern, str(command))]


def reasons(command: Command) -> list[str]:
    """Why a command is not run."""
    return [reason for reason, pattern in NOT_RUN.items() if re.search(pattern, str(command))]


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """A folder with the repository's files that commands name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks/results/leaderboard.tar.xz", tmp_path / "benchmarks/results")
    (tmp_path / "speech.json").write_text("{}")
    return tmp_path


def test_each_command_is_run_or_it_is_said_why_not():
    assert len(COMMANDS) > 100
    for command in COMMANDS:
        found = [*ways(command), *reasons(command)]
        assert found, f"{command}: neither in RUN nor in NOT_RUN"
        assert len(found) == 1 or not ways(command), f"{command}: in several places: {found}"


def test_no_line_of_the_lists_is_left_over():
    assert {way for command in COMMANDS for way in ways(command)} == RUN.keys()
    assert {reason for command in COMMANDS for reason in reasons(command)} == NOT_RUN.keys()


def test_a_shell_command_stands_in_a_block_of_bash():
    """One in an indented block, or in a fence of another name, would not be collected."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        indented = re.findall(r"^\n {4}(?:\./scripts/|python3? -m|kvcompress |pip |wandb ).*", text, re.MULTILINE)
        assert not indented, f"{page}: {indented}"
        assert {*re.findall(r"^```(\w*)$", text, re.MULTILINE)} <= {"", "bash", "python", "yaml", "mermaid"}, page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_parser_of_each_command_takes_its_words(page, scratch, pytestconfig, monkeypatch, capsys):
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    monkeypatch.setattr(layer_budgets.base, "_RULES", dict(layer_budgets.base._RULES))
    if page.stem in OWN_METHOD:
        for name, code in own_files(page).items():
            exec(code, {"__name__": name})
    for name in FILES:
        (scratch / name).touch()
    shutil.copy(calibration_file("triattention", FAMILIES["qwen2"].build()), "tiny.safetensors")
    for folder in ("mine", "long", "worded", "data", "results/tiny_textvqa/tiny"):
        (scratch / folder).mkdir(parents=True)
    for command in shell_commands(page):
        for folder in re.findall(r"results/[\w./*-]+", command.concrete):
            Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            check(command.concrete, pytestconfig)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{command}\n    {type(error).__name__}: {error}\n{capsys.readouterr().err}")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(map(ways, shell_commands(page)))], ids=name_of)
def test_each_command_that_can_be_run_ends_well(page, scratch):
    """Those of a page, one after the other, in one folder."""
    Image.new("RGB", (200, 120), (200, 60, 60)).save("photo.jpg")
    commands = [command for command in shell_commands(page) if ways(command)]
    text, lines = " ".join(command.text for command in commands), ["set -euo pipefail"]
    if "textvqa_val" in text:
        lines.append("python -m lmms_eval_plugins.tiny_vlm.dataset --as-textvqa data")
    if re.search(r"(metrics|report|leaderboard|table) (results|FOLDER)", text):
        lines.append("python -m lmms_eval_plugins.evaluate tiny_textvqa tiny full,snapkv,streamingllm 0.2 --limit 2")
    if page.stem in OWN_METHOD:  # which has the reader save them
        for name, code in own_files(page).items():
            (scratch / f"{name}.py").write_text(code)
        lines.append("export KVCOMPRESS_METHODS=$PWD/value_norm.py")
    for command in commands:
        script = re.sub(r"\./scripts/(\w+\.sh)", lambda name: script_command(name[1]), command.concrete)
        lines += [f"echo {shlex.quote(str(command))} >&2", f"{script} {RUN[ways(command)[0]]}"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def own_files(page: Path) -> dict[str, str]:
    """The files that the page has its reader write: a method, and a layer budget where it shows one."""
    method, *others = code_blocks(page, "python")
    rules = [code for code in others if "register_layer_budget" in code]
    return {"value_norm": method, **dict(zip(["first_half"], rules, strict=False))}


def script_command(name: str) -> str:
    """What a script starts once it has set up, which test_setup_env.py checks."""
    return f"python -m {shlex.join(script_module(name))}"
