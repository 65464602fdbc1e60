"""A file that is damaged, or of another kind, is one line that names it; nothing in it is run."""

import copy
import json
import pickle
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import save_file

from kvcompress.__main__ import main as core_main
from kvcompress.command_line import exit_code
from kvcompress.errors import KVCompressError
from kvcompress.speech.prompts import read_lines
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.cells.run import load_model
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.reproduce.__main__ import main as reproduce_main
from lmms_eval_plugins.reproduce.config import Benchmark, PaperMethod, PaperModel, Reproduction, load_config
from lmms_eval_plugins.sweep.__main__ import main as sweep_main
from lmms_eval_plugins.sweep.config import KEYS, distribution, read_config
from tests.support.wrong_values import wrong_for_kind

from .reproduce.test_reproduce import MINIMAL

BROKEN_JSON = [b"", b"[]", b"null", b"7", b"{", b"\xff\xfe{}", b"[" * 100_000]
BROKEN_YAML = {
    "empty": b"",
    "list": b"- a\n- b\n",
    "text": b"only words",
    "tab": b"parameters:\n\ttask: a\n",
    "not UTF-8": b"task: \xff\xfe\n",
    "twice": b"task: one\ntask: two\n",
    "binary": bytes(range(256)),
    "deep": b"[" * 1000,
    "number as key": b"1: 2\n",
    "no such day": b"task: 2026-99-99\n",
    "python": b"task: !!python/object/apply:os.system ['touch executed']\n",
    "huge": b"task: " + b"9" * 5000 + b"\n",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("executed").exists()
    assert not Path("results").exists()


def one_line(capsys, code: int) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    assert code in (1, 2), lines
    assert lines[-1].startswith("error: ")
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


# -- models


class Executed:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:1000])


def remove(pattern: str):
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Executed()}))


def without_tensors(folder: Path) -> None:
    save_file({}, folder / "model.safetensors", {"format": "pt"})


def unknown_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no_such_type", "architectures": ["No"]}))


DAMAGES = {
    "cut weights": (cut("model.safetensors"), ""),
    "empty weights": (write("model.safetensors", b""), ""),
    "weights without tensors": (without_tensors, "of its weights"),
    "no weights": (remove("*.safetensors"), "model.safetensors"),
    "pickled weights": (pickled, ""),
    "unknown type": (unknown_type, "no_such_type"),
    "no tokenizer": (remove("tokenizer*"), ""),
    "cut tokenizer": (cut("tokenizer.json"), ""),
    "tokenizer's settings are a list": (write("tokenizer_config.json", b"[]"), ""),
    **{f"config {number}": (write("config.json", text), "config.json") for number, text in enumerate(BROKEN_JSON)},
    "config without anything": (write("config.json", b"{}"), ""),
    "text for a number": (write("config.json", b'{"model_type": "llama", "hidden_size": "wide"}'), ""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_one_line(damage, checkpoint, capsys):
    shutil.copytree(checkpoint("llama"), "model")
    break_it, part = DAMAGES[damage]
    break_it(Path("model"))
    argv = ["tiny_textvqa", "./model", "knorm", "0.2"]
    code = exit_code(lambda argv: load_model(Plan.of(parse(argv)).arguments) and None, argv, "cells")
    line = one_line(capsys, code)
    assert "model" in line
    assert part in line


@pytest.mark.parametrize("damage", ["cut weights", "config 1", "unknown type"])
def test_a_damaged_model_is_one_line_to_the_bench(damage, checkpoint, capsys):
    shutil.copytree(checkpoint("llama"), "model")
    DAMAGES[damage][0](Path("model"))
    argv = ["bench", "./model", "--lengths", "8", "--new", "1", "--device", "cpu"]
    assert "model './model' cannot be loaded" in one_line(capsys, core_main(argv))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"image": "a.png"}', b'{"text": 7}',
        b'{"text": "a", "image": 7}', b'{"text": "a", "image": "none.png"}', b'{"text": "a", "audio": "\\u0000"}'],
)  # fmt: skip
def test_broken_prompts_of_the_speech_bench_are_one_line(content):
    Path("prompts.jsonl").write_bytes(content)
    with pytest.raises(KVCompressError, match=r"prompts\.jsonl") as error:
        read_lines(Path("prompts.jsonl"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("argument", ["chat_template", "system_prompt"])
def test_a_file_that_is_no_text_is_one_line(argument, capsys):
    Path("text").write_bytes(b"\xff\xfe")
    assert argument in one_line(capsys, evaluate.main(["tiny_textvqa", "tiny", "knorm", "0.2", f"{argument}=text"]))


@pytest.mark.parametrize("name", ["model.gguf", "config.json", "model"])
def test_a_file_is_no_model(name, capsys):
    Path(name).write_bytes(b"GGUF\x03\x00\x00\x00")
    assert "is a file: give the folder" in one_line(
        capsys, evaluate.main(["tiny_textvqa", f"./{name}", "knorm", "0.2"])
    )


# -- YAML


@pytest.mark.parametrize("content", BROKEN_YAML)
def test_a_broken_sweep_reproduction_or_task_is_one_line(content, capsys):
    Path("tasks").mkdir()
    file = Path("tasks", "mine.yaml")
    file.write_bytes(BROKEN_YAML[content])
    argv = ["tiny_textvqa", "tiny", "knorm", "0.2", "--include_path", "tasks"]
    for main, words in ((sweep_main, ["run", str(file)]), (reproduce_main, [str(file)]), (evaluate.main, argv)):
        assert "mine.yaml" in one_line(capsys, main(words))


NESTED = [(Reproduction, None), (PaperModel, "models"), (Benchmark, "benchmarks"), (PaperMethod, "methods")]


def test_every_key_of_a_reproduction_refuses_what_is_none():
    path, failures, tried = Path("paper.yaml"), [], 0
    for model, part in NESTED:
        for name, field in model.model_fields.items():
            wrong = [value for value in wrong_for_kind(field.annotation) if value is not object]
            wrong += [[]] if field.annotation is not list and "list" not in str(field.annotation) else ["x", 7]
            for value in [value for value in wrong if not (value == {} and "dict" in str(field.annotation))]:
                config = copy.deepcopy(MINIMAL)
                (config[part][0] if part else config)[name] = value
                path.write_text(yaml.safe_dump(config))
                tried += 1
                try:
                    load_config(str(path))
                except KVCompressError as error:
                    failures += [f"{name}={value!r:.60}: {error}"] if "\n" in str(error) else []
                except Exception as error:
                    failures.append(f"{name}={value!r:.60}: {type(error).__name__}: {str(error)[:100]}")
                else:
                    failures.append(f"{name}={value!r:.60} is accepted")
    assert failures == []
    assert tried > 100


def test_every_key_of_a_sweep_refuses_what_is_none():
    sweep = {"method": "random", "metric": {"name": "accuracy"}, "run_cap": 2, "parameters": {"task": {"value": "a"}}}
    wrong = [7.5, -1, True, [], [[]], {1: 2}, "\n", float("nan"), "x" * 5000, 2**70]
    for name in {*KEYS} - {"name", "description", "project", "entity", "program", "command"}:
        for value in wrong:
            Path("sweep.yaml").write_text(yaml.safe_dump({**sweep, name: value}))
            with pytest.raises(KVCompressError) as error:
                read_config(Path("sweep.yaml"), {})
            assert "\n" not in str(error.value)
            assert len(str(error.value)) < 1000
    for kind in ("constant", "categorical", "int_uniform", "uniform", "log_uniform_values", "q_uniform", 7, [], None):
        for value in [*wrong[2:], None, "wide", float("inf")]:
            for keys in (("values",), ("min", "max"), ("min", "max", "q")):
                with pytest.raises(KVCompressError):
                    distribution("x", {"distribution": kind, **dict.fromkeys(keys, value)})


@pytest.mark.parametrize("name", ["..", ".", "a" * 300])
def test_a_sweep_stays_in_its_own_folder(name):
    Path("sweep.yaml").write_text(yaml.safe_dump({"method": "grid", "parameters": {"task": {"value": "a"}}}))
    with pytest.raises(KVCompressError, match="a sweep cannot be called"):
        read_config(Path("sweep.yaml"), {}, name)
