"""Wrong contents, drawn for every file that a command reads: each ends well, or with one line and exit code 2.

    python -m tests.contents --cases 500 --seed 1

Case i follows from the seed and i alone; a failure is run again with `--only i`. A case ends well as `ok`, where what
was drawn is no fault, or as `refused`: exit code 2 and one `error:` line that names the file, no traceback, no file
lost. `tests/support/wrong_contents.py` has what is done to a file.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # which the hub's client reads at import

import lmms_eval.tasks
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForImageTextToText

import kvcompress
from kvcompress import methods
from kvcompress.__main__ import main as core_main
from kvcompress.bench.results import Results
from kvcompress.cache.cache import CompressedCache
from kvcompress.calibration.files import ModelIdentity
from kvcompress.command_line import exit_code
from kvcompress.speech.prompts import growing_wav, read_prompts
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.long_pack.dataset import Pack, write
from lmms_eval_plugins.long_pack.prompts import Look
from lmms_eval_plugins.model.arguments import BUNDLED_CALIBRATIONS, TINY_CHECKPOINT, TINY_MODEL
from lmms_eval_plugins.sweep.__main__ import main as sweep_main
from tests.support.docs import DOCS, python_blocks
from tests.support.learned_checkpoints import checkpoint_for
from tests.support.wrong_contents import (
    Wrong,
    damaged,
    wrong_json,
    wrong_lines,
    wrong_parquet,
    wrong_pickle,
    wrong_program,
    wrong_table,
    wrong_template,
    wrong_tensors,
    wrong_yaml,
)

MOST_SECONDS = 60  # of a case: then it counts as without end
CELL = "results/tiny_textvqa/tiny/knorm-0.2-limit=2"
RATE = 16_000
WORLD = tempfile.TemporaryDirectory(prefix="kvcompress-contents-")  # goes with the process
OUTPUTS = re.compile(r"(^|/)(out/|report|throughput|heatmap|leaderboard\.html|speech\.html|x\.html|\.lock$)")


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        files: of the folder that `world` makes; one is drawn.
        wrong: what is done to its contents, beside `damaged`.
        commands: that read it; one is drawn. Each returns its exit code.
        named: what an error may call it, beside its name.
        made_again: files that a command rightly replaces, as a pattern.
        most: bytes that are left of what was drawn.
    """

    files: tuple[str, ...]
    wrong: Wrong
    commands: tuple[Callable[[], int], ...]
    named: tuple[str, ...] = ()
    made_again: str = "$^"
    most: int = 10**9


def command(line: str) -> Callable[[], int]:
    """A command of `kvcompress`, to be called."""
    return lambda: core_main(line.split())


def answering(*words: str, task: str = "tiny_textvqa", model: str = TINY_MODEL, method: str = "knorm") -> int:
    return evaluate.main([task, model, method, "0.2", "--limit", "2", *words, "--output_path", "out"])


def sweeping() -> int:
    """All but the trials."""
    with (
        mock.patch("lmms_eval_plugins.sweep.runner.run_here", return_value=None),
        mock.patch("lmms_eval_plugins.sweep.table.write_table", return_value=None),
    ):
        return sweep_main(["run", "sweep.yaml", "--output_path", "sweeping"])


def aloud() -> int:
    """What the speech bench does with its prompts."""
    return exit_code(lambda argv: read_prompts(Path("speech.jsonl"), RATE, []) and None, [], "prompts")


def resumed() -> int:
    """What the benches do with their earlier results."""
    given = {"settings": {"a": 1}, "environment": {"device": "cpu"}}
    return exit_code(
        lambda argv: Results(Path("bench.json"), given, resume=True).has("cells", length=1) and None, [], ""
    )


def reused() -> int:
    """Reuse a saved cache as a program does."""
    return exit_code(lambda argv: CompressedCache.load("cache.safetensors", tiny_model()) and None, [], "cache")


@cache
def tiny_model() -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(TINY_CHECKPOINT)


def with_methods() -> int:
    with (
        mock.patch.object(methods, "_METHODS", dict(methods._METHODS)),
        mock.patch.object(methods, "_FILES", set()),
        mock.patch.dict(os.environ, {methods.FILES: "mine.py"}),
    ):
        return core_main(["list", "methods"])


PUBLISHED = {
    "sparsemm": ("scores.json", wrong_json),
    "mixkv": ("similarity.json", wrong_json),
    "prefixkv": ("prefixkv_model_0.5.json", wrong_json),
    "q-filters": ("filters.safetensors", wrong_tensors),
    "expected-attention": ("stats.safetensors", wrong_tensors),
    "duoattention": ("heads.tsv", wrong_table),
    "triattention": ("tri.pt", wrong_pickle),
}
CALIBRATED = ("adamixkv", "duoattention", "expected-attention", "prefixkv", "q-filters", "sparsemm", "triattention")
MODEL_FILES = ("config", "generation_config", "processor_config", "tokenizer", "tokenizer_config")
CELLS = "results/tiny_textvqa/tiny"
READERS = tuple(
    map(
        command,
        (
            f"table {CELLS}",
            f"metrics {CELLS}",
            f"metrics {CELLS} --json",
            f"heatmap {CELLS} --x question_id --y image_id",
            "report results --out out",
            "leaderboard results --out out/leaderboard.html",
            "leaderboard --check results",
            "reproduce paper.yaml --report-only --limit 2",
            f"eval tiny_textvqa {TINY_MODEL} full,knorm 0.2 --limit 2 --show_config",
        ),
    )
)
OF_CELL = (READERS, (CELL,), f"^{CELL}/|/images/")
WITH_MODEL = (partial(answering, model="./model"),)
WITH_KVZAP = (partial(answering, "checkpoint=kvzap", method="kvzap"),)
WITH_TASKS = (partial(answering, "--include_path", "tasks", task="mine_needle"),)
CALIBRATE = "calibrate model --out out/x.safetensors --method"
TEXT = f"{CALIBRATE} q-filters --text text.txt --length 64 --questions 1"
SHOW = "show picture.png What? --out out/x.html window_size=4"
CHECKS = (command("leaderboard mine.tar.xz --out out/leaderboard.html"), command("leaderboard --check mine.tar.xz"))

# fmt: off
KINDS = {
    "chat template": Kind(("template.jinja",), wrong_template, (partial(answering, "chat_template=template.jinja"),)),
    "system prompt": Kind(("system.txt",), damaged, (partial(answering, "system_prompt=system.txt"),), most=2000),
    "model": Kind(tuple(f"model/{name}.json" for name in MODEL_FILES), wrong_json, WITH_MODEL, ("model",)),
    "template of a model": Kind(("model/chat_template.jinja",), wrong_template, WITH_MODEL, ("model",)),
    "weights": Kind(("model/model.safetensors",), wrong_tensors, WITH_MODEL, ("model",)),
    **{f"calibration of {method}": Kind((f"{method}.safetensors",), wrong_tensors,
                                        (partial(answering, f"calibration={method}.safetensors", method=method),))
       for method in CALIBRATED},
    **{f"published {method}": Kind((file,), wrong, (command(f"{CALIBRATE} {method} --published {file}"),))
       for method, (file, wrong) in PUBLISHED.items()},
    "text to calibrate": Kind(("text.txt",), damaged, (command(TEXT),)),
    "KVzap config": Kind(("kvzap/config.json",), wrong_json, WITH_KVZAP, ("kvzap",)),
    "KVzap weights": Kind(("kvzap/model.safetensors",), wrong_tensors, WITH_KVZAP, ("kvzap",)),
    "gates": Kind(("gates.pt",), wrong_pickle, (partial(answering, "checkpoint=gates.pt", method="fastkvzip"),)),
    "sweep": Kind(("sweep.yaml",), wrong_yaml, (sweeping,), ("parameter", "trial"), r"^sweeping/"),
    "sweep's note": Kind(("sweeping/sweeps/sweep/sweep.json",), wrong_json, (sweeping,), ("sweeps/sweep",),
                         r"^sweeping/"),
    "sweep's journal": Kind(("sweeping/sweeps/sweep/study.journal",), wrong_lines, (sweeping,), (), r"^sweeping/"),
    "reproduction": Kind(("paper.yaml",), wrong_yaml, (command("reproduce paper.yaml --dry-run"),),
                         ("model", "task", "method")),
    "reference": Kind(("paper.csv",), wrong_table, (command("reproduce paper.yaml --report-only"),)),
    "task": Kind(("tasks/mine_needle/mine_needle.yaml",), wrong_yaml, WITH_TASKS, ("tasks", "mine_needle")),
    "questions": Kind(("tasks/mine_needle/questions.parquet",), wrong_parquet,
                      (*WITH_TASKS, partial(*WITH_TASKS, "--check_integrity")), ("mine_needle",)),
    "cell's results": Kind((f"{CELL}/results.json",), wrong_json, *OF_CELL),
    "cell's samples": Kind((f"{CELL}/samples.jsonl",), wrong_lines, *OF_CELL),
    "cell's survivors": Kind((f"{CELL}/survivors.jsonl",), wrong_lines, *OF_CELL),
    "archive": Kind(("mine.tar.xz",), damaged, CHECKS, ("mine",)),
    "answers": Kind(("answers",), wrong_lines, (partial(answering, "--use_cache", "answers"),), ("answers",),
                    "^answers/"),
    "spoken prompts": Kind(("speech.jsonl",), wrong_lines, (aloud,), ("picture.png", "sound.wav")),
    "sound": Kind(("sound.wav",), damaged, (aloud,)),
    "picture": Kind(("picture.png",), damaged, (aloud, command(SHOW))),
    "speech results": Kind(("speech.json",), wrong_json, (command("report speech.json --out out"),)),
    "bench results": Kind(("bench.json",), wrong_json, (resumed,)),
    "saved cache": Kind(("cache.safetensors",), wrong_tensors, (reused,)),
    "methods": Kind(("mine.py",), wrong_program, (with_methods,)),
}
# fmt: on


# -- the right files


def make_world(here: Path) -> None:
    """Every kind of file, right, in a new folder."""
    with working_in(here):
        shutil.copytree(TINY_CHECKPOINT, "model", ignore=shutil.ignore_patterns("*.md", "*.jsonl"))
        shutil.copy("model/chat_template.jinja", "template.jinja")
        Path("system.txt").write_text("Answer in one word.\n")
        Path("text.txt").write_text("A text about signs, colours, and what stands on them.\n" * 40)
        for method in CALIBRATED:
            shutil.copy(BUNDLED_CALIBRATIONS[TINY_MODEL] / f"{method}.safetensors", ".")
        config = AutoConfig.from_pretrained("model")
        make_published(ModelIdentity.of(config, len(CompressedCache(config).compressed_layers)))
        model = mock.Mock(config=config)
        shutil.copytree(checkpoint_for("kvzap", model), "kvzap")
        shutil.copy(checkpoint_for("fastkvzip", model), "gates.pt")
        make_configurations()
        make_cache()
        look = Look((64, 64), (64, 64), 8, 4, 1)
        pack = Pack(name="mine", lengths=(2,), questions=1, depths=(0.5,), kinds=("retrieval_text",), look=look)
        collections.deque(write(pack, Path("tasks")), maxlen=0)
        make_speech()
        Path("mine.py").write_text(python_blocks(DOCS / "adding-a-method.md")[0])
        sweeping()
        words = ["tiny_textvqa", TINY_MODEL, "full,knorm", "0.2", "--limit", "2", "--overlays", "1"]
        assert evaluate.main([*words, "--use_cache", "answers"]) == 0
        with tarfile.open("mine.tar.xz", "w:xz") as archive:
            archive.add("results")


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def make_published(model: ModelIdentity) -> None:
    """In the forms in which authors have published them."""
    layers, heads, kv_heads, size = model.layers, model.heads, model.kv_heads, model.head_dim
    scores = {f"{layer}-{head}": [0.5, layer + head] for layer in range(layers) for head in range(heads)}
    Path("scores.json").write_text(json.dumps(scores))
    weights = {f"{layer}-{head}-key": [0.2, layer / 10] for layer in range(layers) for head in range(kv_heads)}
    Path("similarity.json").write_text(json.dumps(weights))
    for part in range(10):
        Path(f"prefixkv_model_{part / 10}.json").write_text(json.dumps([part / 10] * layers))
    save_file({"q_filters": torch.ones(layers, kv_heads, size)}, "filters.safetensors")
    means = {"query_mean": torch.ones(layers, heads, size), "query_cov": torch.ones(layers, heads, size, size)}
    save_file(means, "stats.safetensors")
    Path("heads.tsv").write_text("\n".join("\t".join("0.5" for _ in range(kv_heads)) for _ in range(layers)) + "\n")
    of_head = {name: torch.ones(size // 2) for name in ("q_mean_real", "q_mean_imag", "q_abs_mean")}
    names = [f"layer{layer:02d}_head{head:02d}" for layer in range(layers) for head in range(heads)]
    torch.save({"stats": {name: of_head for name in names}}, "tri.pt")


def make_configurations() -> None:
    sweep = {
        "method": "grid",
        "metric": {"name": "accuracy", "goal": "maximize"},
        "parameters": {
            "task": {"value": "tiny_textvqa"}, "model": {"value": TINY_MODEL}, "limit": {"value": 2},
            "method": {"values": ["full", "knorm"]}, "ratio": {"values": [0.5, 0.2]},
        },
        "run_cap": 3,
    }  # fmt: skip
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    paper = {
        "title": "A paper", "paper": "https://example.org", "about": "About it.",
        "reference": "paper.csv", "source": "read from the figure",
        "models": [{"name": "M", "pretrained": TINY_MODEL, "gpu": False}],
        "benchmarks": [{"name": "Signs", "task": "tiny_textvqa"}, {"name": "Judged", "task": None, "needs": "a judge"}],
        "methods": [{"name": "Full", "method": "full"}, {"name": "KNorm", "method": "knorm", "options": {}}],
        "ratios": [0.2],
    }  # fmt: skip
    Path("paper.yaml").write_text(yaml.safe_dump(paper))
    Path("paper.csv").write_text(
        "model,method,ratio_kept,benchmark,value,est_error_abs\nM,Full,1,Signs,90,0.5\nM,KNorm,0.2,Signs,80,0.5\n"
    )


def make_cache() -> None:
    """Save the cache of a prompt without a picture."""
    options = {"decode_budget": 9, "cache_implementation": "offloaded"}
    with torch.no_grad(), kvcompress.compress(tiny_model(), "h2o", 0.3, **options) as session:
        tiny_model()(input_ids=torch.arange(20, 60)[None])
    session.cache.save("cache.safetensors")


def make_speech() -> None:
    Image.new("RGB", (96, 64), "red").save("picture.png")
    with wave.open("sound.wav", "wb") as sound:
        sound.setparams((1, 2, RATE, 0, "NONE", ""))
        sound.writeframes(b"\0\1" * RATE)
    lines = [{"text": "Why?"}, {"text": "What?", "image": "picture.png"}, {"text": "Who?", "audio": "sound.wav"}]
    Path("speech.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with growing_wav(Path("heard/a.wav")) as write_block:
        write_block(torch.zeros(4000))
    numbers = dict.fromkeys(
        ["first_text_s", "text_s", "first_code_s", "first_audio_s", "waveform_s", "audio_s", "real_time_factor",
         "underruns", "text_tokens", "realised_ratio", "kv_bytes", "talker_kv_bytes"], 1.0,
    )  # fmt: skip
    answer = {"strategy": "dynamic", "prompt": 0, "wav": "heard/a.wav", "text": "Because.", **numbers}
    spoken = {
        "command": "python -m kvcompress speech",
        "settings": {"labels": {"dynamic": "DynamicCache"}, "strategies": ["dynamic"], "window": [4, 4, 2],
                     "one_piece": False, "without": [], "talker": None},
        "environment": {"device": "a CPU"},
        "prompts": [{"text": "Why?", "image": False, "audio_s": None}],
        "cold": [{"strategy": "dynamic", "prompt": 0, "answer": answer}],
        "warm": [{"repeat": 1, "answers": [answer]}],
    }  # fmt: skip
    Path("speech.json").write_text(json.dumps(spoken))
    cell = {"length": 1, "batch": 1, "ways": {}}
    measured = {"settings": {"a": 1}, "environment": {"device": "cpu"}, "cells": [cell], "largest": []}
    Path("bench.json").write_text(json.dumps(measured))


@cache
def world() -> Path:
    """A folder with every kind of file, made once."""
    folder = Path(WORLD.name, "right")
    folder.mkdir()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), small_index():
        make_world(folder)
    return folder


@contextlib.contextmanager
def small_index() -> Iterator[None]:
    """Leaves lmms-eval's own 1900 task files out of the index, which take seconds to read."""
    manager = partial(lmms_eval.tasks.TaskManager, include_defaults=False)
    with mock.patch.object(lmms_eval.tasks, "TaskManager", manager):
        yield


# -- cases


@dataclass(frozen=True)
class Case:
    """`what` was done to `file`, which `command` of its kind then reads."""

    kind: str
    file: str
    what: str
    content: bytes
    command: int


def draw(seed: int, index: int, only: str = "") -> Case:
    """Case `index`; `only`: of the kinds whose names have that in them."""
    rng = random.Random(f"{seed} {index}")
    name = rng.choice([name for name in KINDS if only in name])
    kind = KINDS[name]
    file = rng.choice(kind.files)
    if (world() / file).is_dir():
        file = str(rng.choice(sorted((world() / file).rglob("*.jsonl"))).relative_to(world()))
    content = (world() / file).read_bytes()
    what, wrong = (damaged if rng.random() < 0.3 else kind.wrong)(rng, content)
    return Case(name, file, what, wrong[: kind.most], rng.randrange(len(kind.commands)))


class WithoutEnd(BaseException):
    """The time of a case is over."""


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    def over(number: int, frame: object) -> None:
        raise WithoutEnd

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def in_a_world() -> Iterator[Path]:
    """Works in a folder with every kind of file, right; at the end they are put right again."""
    with mock.patch.dict(os.environ), small_index(), working_in(_copy()):
        try:
            yield _copy()
        finally:
            _put_right(_copy())


@cache
def _copy() -> Path:
    """The folder in which commands run, one for all cases: to copy and remove it takes longer than most commands."""
    return Path(shutil.copytree(world(), Path(WORLD.name, "here")))


@cache
def right() -> dict[str, bytes]:
    """The right content of every file, by its name."""
    return contents(world())


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _put_right(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):  # what lies in a folder before the folder itself
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()
        elif path.relative_to(folder).as_posix() not in right():
            path.unlink()
    now = contents(folder)
    for name, content in right().items():
        if now.get(name) != content:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def outcome(case: Case) -> tuple[str, str]:
    """`ok`, `refused`, or what is wrong about how it ends; and what was said."""
    with in_a_world() as here:
        (here / case.file).write_bytes(case.content)
        code, said = run(KINDS[case.kind].commands[case.command])
        after = contents(here)
    kind = KINDS[case.kind]
    lost = [
        file for file, content in {**right(), case.file: case.content}.items()
        if after.get(file) != content and not OUTPUTS.search(file) and not re.search(kind.made_again, file)
    ]  # fmt: skip
    if lost:
        return f"changes {lost[0]}", said
    if left := [file for file in after if ".unfinished-" in file]:
        return f"leaves {left[0]}", said
    if "Traceback (most recent call last)" in said:
        return "traceback", said
    if code == 0:
        return "ok", said
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    if code == 2 and not lines and re.search(r"^(here/results|mine): ", said, re.MULTILINE):
        return "refused", said  # leaderboard --check has a line for each problem
    if code == 1 and len(lines) == 1 and "scoring failed: " in lines[0]:
        return "refused", said  # by the task's own code, which no one can ask before; the answers are kept
    if code != 2 or len(lines) != 1 or len(lines[0]) > 3000:
        return f"exit code {code}, {len(lines)} lines", said
    if not any(part in lines[0] for part in (Path(case.file).name, *kind.named)):
        return "does not name the file", said
    return "refused", said


def run(command: Callable[[], int]) -> tuple[int | str, str]:
    """The exit code, and stderr."""
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
    ):
        try:
            with limited_time():
                code = command()
        except WithoutEnd:
            code = f"none in {MOST_SECONDS} s"
        except BaseException:  # whatever it is, it is a finding
            code = "none"
            traceback.print_exc(limit=-6)
    return code, said.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="", help="only kinds with this in their name")
    parser.add_argument("--only", type=int, help="run this case alone and show what it says")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    failed, counts = 0, collections.Counter()
    for index in tqdm([arguments.only] if arguments.only is not None else range(arguments.cases)):
        case = draw(arguments.seed, index, arguments.kind)
        start = time.monotonic()
        found, said = outcome(case)
        counts[found if found in ("ok", "refused") else "failed"] += 1
        is_bad = found not in ("ok", "refused")
        failed += is_bad
        if is_bad or arguments.only is not None:
            tail = "\n".join(line[:300] for line in said.splitlines()[-12:])
            seconds = time.monotonic() - start
            where = f"--seed {arguments.seed} --only {index}"
            tqdm.write(f"{found}: {where}: {case.kind}, {case.file}: {case.what} ({seconds:.1f} s)\n{tail}\n")
    print(f"{counts.total()} cases: {dict(counts)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
