"""Whatever stands in a file: what is wrong is one line that names it, exit code 2, and nothing is lost.

Contents are drawn by `tests/contents.py`, for every kind of file that a command reads. Below are some by name.
"""

import json
import os
import re
import sys

import pytest
import torch
import yaml
from safetensors.torch import save

from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells.results import RESULTS_FILE, SAMPLES_FILE
from lmms_eval_plugins.long_pack.__main__ import main as long_pack_main
from lmms_eval_plugins.model.answer_store import AnswerStore
from tests.contents import CELL, KINDS, Case, draw, in_a_world, outcome, world
from tests.support.evaluation import FOUR, error_line
from tests.support.examples import every_third, some
from tests.support.wrong_contents import DEPTH, TEMPLATES

pytestmark = pytest.mark.usefixtures("clean_process")

NESTED = b"[" * DEPTH + b"]" * DEPTH


def ends_badly(cases: range, seed: int) -> list[str]:
    found = []
    for index in cases:
        case = draw(seed, index)
        how, said = outcome(case)
        if how not in ("ok", "refused"):
            found.append(f"--seed {seed} --only {index}: {case.kind}: {case.what}: {how}: {said[-300:]}")
    return found


def test_drawn_contents_end_well():
    assert ends_badly(range(10), seed=0) == []


@pytest.mark.slow
def test_hundreds_of_drawn_contents_end_well():
    assert ends_badly(range(500), seed=int(os.environ.get("CONTENTS_SEED", 1))) == []


@pytest.mark.slow
def test_every_right_file_is_read():
    for name, kind in KINDS.items():
        file = kind.files[0]
        if (world() / file).is_file():
            case = Case(name, file, "nothing", (world() / file).read_bytes(), 0)
            assert outcome(case)[0] == "ok", name


def refused(kind: str, content: bytes, file: str | None = None, command: int = 0) -> str:
    """The error's line."""
    how, said = outcome(Case(kind, file or KINDS[kind].files[0], "", content, command))
    assert how == "refused", said[-2000:]
    return [line for line in said.splitlines() if line.startswith("error: ")][-1]


@pytest.mark.parametrize("name", every_third(sorted({*TEMPLATES} - {"nothing", "wrong index", "undefined"})))
def test_a_template_that_cannot_be_rendered_is_named(name):
    if name == "huge number" and not hasattr(sys, "get_int_max_str_digits"):
        pytest.skip("this Python writes any number")
    assert "template.jinja" in refused("chat template", TEMPLATES[name].encode())


@pytest.mark.parametrize("name", some(["division by zero", "no picture", "nested parentheses"], ["no picture"]))
def test_a_checkpoint_with_a_wrong_template_is_named(name):
    assert "/model" in refused("template of a model", TEMPLATES[name].encode())


def with_json(**changes):
    return lambda content: json.dumps({**json.loads(content), **changes}).encode()


def with_header(**changes):
    """Changes of what a file of tensors says about itself; `model` may be a change of what it says of its model."""

    def change(content: bytes) -> bytes:
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        said = header["__metadata__"]
        for name, value in changes.items():
            said[name] = json.dumps({**json.loads(said[name]), **value}) if isinstance(value, dict) else value
        written = json.dumps(header).encode()
        return len(written).to_bytes(8, "little") + written + content[end:]

    return change


def with_gates(dtype: torch.dtype):
    def change(content: bytes) -> bytes:
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        return save({"gates": torch.ones(5, 2, dtype=dtype)}, metadata)

    return change


def broken_in_the_middle(content: bytes) -> bytes:
    middle = len(content) * 3 // 4
    return content[:middle] + b"\xff" * 60 + content[middle + 60 :]


def without_a_limit(content: bytes) -> bytes:
    sweep = yaml.safe_load(content)
    sweep["parameters"]["limit"] = {"value": 0}
    return yaml.safe_dump(sweep).encode()


def without_image_token(content: bytes) -> bytes:
    config = json.loads(content)
    del config["image_token_index"]
    return json.dumps(config).encode()


def with_words_for_numbers(content: bytes) -> bytes:
    settings = json.loads(content)
    settings["image_processor"]["image_std"] = [["x", {}], 0.5, 0.5]
    return json.dumps(settings).encode()


ENDS = ("x", float("nan"), 1.5, -2, [2, None, "x"], [None], {})
WRONG_MODELS = ({"head_dim": 10**400}, {"layers": None}, {"heads": "wide"}, {"name": []}, {"head_dim": 2**70})
# fmt: off
REFUSED = [  # kind of file, its file where the kind has several, what stands in it, what is said
    ("chat template", "", TEMPLATES["division by zero"].encode(), "ZeroDivisionError"),
    ("chat template", "", TEMPLATES["include"].encode(), "no loader"),
    ("chat template", "", TEMPLATES["huge range"].encode(), "Range too big"),
    ("chat template", "", TEMPLATES["no picture"].encode(), "<image>"),
    *((f"published {method}", "", NESTED, "nested too deep") for method in ("sparsemm", "mixkv", "prefixkv")),
    *(("calibration of q-filters", "", with_header(model=wrong), "q-filters.safetensors") for wrong in WRONG_MODELS),
    *(("calibration of q-filters", "", with_header(model=text), "metadata that cannot be read")
      for text in ("{}", "[]", "7", NESTED.decode(), "{")),
    *(("calibration of duoattention", "", with_gates(dtype), f"'gates' of {dtype}")
      for dtype in (torch.float16, torch.int64, torch.complex64, torch.bool)),
    ("KVzap weights", "", lambda content: content[:-4] + b"\0\0\xc0\x7f", "not finite"),
    ("KVzap config", "", NESTED, "nested too deep"),
    ("sweep's journal", "", lambda content: b"".join(content.splitlines(True)[:-2])[:-1] + b"{\n", "remove it"),
    ("sweep's note", "", NESTED, "remove it"),
    ("sweep", "", without_a_limit, "sweep.yaml"),
    ("questions", "", lambda content: content[:-100], "questions.parquet: ArrowInvalid"),
    ("questions", "", lambda content: content[:3665] + b"\0" + content[3665:], "questions.parquet: "),  # not the hub
    ("task", "", lambda content: content.replace(b"dataset_path: parquet", b"dataset_path: 7"),
     "mine_needle.yaml: TypeError"),
    ("task", "", lambda content: re.sub(rb"(?m)^( +test): .*$", rb"\1: nowhere.parquet", content),
     "mine_needle.yaml.*there is no file 'nowhere.parquet'"),
    ("archive", "", broken_in_the_middle, "mine.tar.xz"),
    ("methods", "", b"raise SystemExit(7)", "mine.py: SystemExit"),
    ("sound", "", lambda content: content[:7105], "sound.wav is not a WAV file: it is truncated"),
    *(("model", "generation_config.json", json.dumps({"eos_token_id": wrong}).encode(), "eos_token_id")
      for wrong in ENDS),
    *(("model", "config.json", with_json(image_grid_pinpoints=[[336, 336], wrong]), "image_grid_pinpoints")
      for wrong in ([336], [336, "x"], [0, 336], 7)),
    *(("model", "config.json", with_json(vision_feature_layer=wrong), "vision_feature_layer")
      for wrong in (10**9, -(10**9))),
    ("model", "config.json", without_image_token, "image_token_index"),
    ("model", "processor_config.json", with_words_for_numbers, "processor"),
]
# fmt: on


@pytest.mark.parametrize(("kind", "file", "content", "said"), REFUSED)
def test_what_cannot_be_is_one_line_that_says_why(kind, file, content, said):
    file = f"model/{file}" if file else KINDS[kind].files[0]
    line = refused(kind, content if isinstance(content, bytes) else content((world() / file).read_bytes()), file)
    assert re.search(said, line)


def test_generated_tasks_say_how_much_they_draw(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    words = ["--questions", "1", "--lengths", "2", "--kinds", "counting", "--picture-size", "64x64", "--font-px", "6"]
    assert long_pack_main([*out, *words]) == 0
    assert "drawing prompts with 2 pictures and pages in all" in capsys.readouterr().err


def test_a_task_of_a_list_whose_data_is_damaged_is_left_out(capsys):
    with in_a_world() as here:
        (here / "tasks/mine_needle/questions.parquet").write_bytes(b"PAR1")
        argv = ["mine_needle,tiny_textvqa", *FOUR[1:], "--include_path", "tasks", "--limit", "1"]
        assert evaluate.main([*argv, "--output_path", "listed"]) == 1
        assert "1 task(s) without results: mine_needle (the data of task 'mine_needle' cannot be" in error_line(capsys)
        assert (here / "listed/tiny_textvqa/tiny/snapkv-0.2-limit=1/results.json").is_file()


@pytest.mark.parametrize(
    ("part", "wrong", "named", "reader"),
    [
        ("configs", "x", "configs is 'x'", 0),
        ("group_subtasks", {"tiny_textvqa": 7}, "group_subtasks.tiny_textvqa is 7", 4),
        ("metric_tokens", True, "metric_tokens is True", 6),
        ("results", {"tiny_textvqa": None}, "results.tiny_textvqa is None", 1),
        ("efficiency", {"tpot_s": {"median": "\x1b[31m"}}, "efficiency.tpot_s.median is '\\x1b[31m'", 4),
        ("environment", {"processes": " "}, "environment.processes is ' '", 6),
    ],
)
def test_a_cell_with_a_part_of_another_kind_is_left_out_and_named(part, wrong, named, reader):
    results = json.loads((world() / CELL / RESULTS_FILE).read_text())
    case = Case("cell's results", f"{CELL}/{RESULTS_FILE}", "", json.dumps({**results, part: wrong}).encode(), reader)
    how, said = outcome(case)
    assert how == ("refused" if reader == 6 else "ok"), "a check of a submission refuses, others take the rest"
    assert f"results.json is damaged: {named}" in said


def test_a_question_without_its_measurement_and_overlays_without_their_task_are_damaged():
    first, *rest = (world() / CELL / SAMPLES_FILE).read_text().splitlines()
    sample = json.loads(first)
    del sample["measurement"]["tokens_out"]
    case = Case("cell's samples", f"{CELL}/{SAMPLES_FILE}", "", "\n".join([json.dumps(sample), *rest]).encode(), 4)
    assert "samples.jsonl, line 1, is damaged: no measurement.tokens_out" in outcome(case)[1]
    asked, entry = (world() / CELL / "survivors.jsonl").read_text().splitlines()
    entry = {name: value for name, value in json.loads(entry).items() if name != "task"}
    case = Case("cell's survivors", f"{CELL}/survivors.jsonl", "", f"{asked}\n{json.dumps(entry)}\n".encode(), 4)
    assert "survivors.jsonl is damaged: line 2: no task" in outcome(case)[1]


def test_an_answer_that_was_changed_on_disk_is_no_answer(tmp_path):
    AnswerStore(tmp_path, {"cell": 1}).put("a", {"texts": ["yes"]})
    (file,) = tmp_path.rglob("*.jsonl")
    assert AnswerStore(tmp_path, {"cell": 1}).get("a") == {"texts": ["yes"]}
    file.write_text(file.read_text().replace("yes", "no"))
    assert AnswerStore(tmp_path, {"cell": 1}).get("a") is None
