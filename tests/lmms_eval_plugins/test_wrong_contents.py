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


def test_the_reason_is_jinjas():
    words = {"division by zero": "ZeroDivisionError", "include": "no loader", "huge range": "Range too big"}
    for name, reason in words.items():
        assert reason in refused("chat template", TEMPLATES[name].encode())
    line = refused("chat template", TEMPLATES["no picture"].encode())
    assert "<image>" in line


def test_generated_tasks_say_how_much_they_draw(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    words = ["--questions", "1", "--lengths", "2", "--kinds", "counting", "--picture-size", "64x64", "--font-px", "6"]
    assert long_pack_main([*out, *words]) == 0
    assert "drawing prompts with 2 pictures and pages in all" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["sparsemm", "mixkv", "prefixkv"])
def test_a_published_file_that_is_nested_deeply_is_one_line(method):
    assert "nested too deep" in refused(f"published {method}", NESTED)


def changed_header(method: str, name: str, text: str) -> bytes:
    content = (world() / f"{method}.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"][name] = text
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + content[8 + length :]


def test_a_calibration_whose_header_lies_is_one_line():
    content = (world() / "q-filters.safetensors").read_bytes()
    model = json.loads(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]["model"])
    for changed in ({"head_dim": 10**400}, {"layers": None}, {"heads": "wide"}, {"name": []}, {"head_dim": 2**70}):
        text = json.dumps({**model, **changed})
        assert "q-filters.safetensors" in refused(
            "calibration of q-filters", changed_header("q-filters", "model", text)
        )
    for text in ("{}", "[]", "7", NESTED.decode(), "{"):
        line = refused("calibration of q-filters", changed_header("q-filters", "model", text))
        assert "metadata that cannot be read" in line


@pytest.mark.parametrize("kind", [torch.float16, torch.int64, torch.complex64, torch.bool])
def test_a_calibration_of_another_precision_is_one_line(kind):
    content = (world() / "duoattention.safetensors").read_bytes()
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    wrong = save({"gates": torch.ones(5, 2, dtype=kind)}, metadata)
    assert f"'gates' of {kind}" in refused("calibration of duoattention", wrong)


def test_a_checkpoint_with_what_is_no_finite_number_is_one_line():
    content = (world() / "kvzap/model.safetensors").read_bytes()
    assert "not finite" in refused("KVzap weights", content[:-4] + b"\0\0\xc0\x7f")
    assert "nested too deep" in refused("KVzap config", NESTED)


def test_a_damaged_sweep_is_bad_input():
    journal = (world() / "sweeping/sweeps/sweep/study.journal").read_bytes()
    assert "remove it" in refused("sweep's journal", b"".join(journal.splitlines(keepends=True)[:-2])[:-1] + b"{")
    assert "remove it" in refused("sweep's note", NESTED)


def test_data_that_cannot_be_read_is_bad_input():
    data = (world() / "tasks/mine_needle/questions.parquet").read_bytes()
    assert "questions.parquet: ArrowInvalid" in refused("questions", data[:-100])
    assert "questions.parquet: " in refused("questions", data[:3665] + b"\0" + data[3665:])  # no hub is to blame
    task = (world() / "tasks/mine_needle/mine_needle.yaml").read_bytes()
    assert "mine_needle.yaml: TypeError" in refused("task", task.replace(b"dataset_path: parquet", b"dataset_path: 7"))


def test_a_task_of_a_list_whose_data_is_damaged_is_left_out(capsys):
    with in_a_world() as here:
        (here / "tasks/mine_needle/questions.parquet").write_bytes(b"PAR1")
        argv = ["mine_needle,tiny_textvqa", *FOUR[1:], "--include_path", "tasks", "--limit", "1"]
        assert evaluate.main([*argv, "--output_path", "listed"]) == 1
        assert "1 task(s) without results: mine_needle (the data of task 'mine_needle' cannot be" in error_line(capsys)
        assert (here / "listed/tiny_textvqa/tiny/snapkv-0.2-limit=1/results.json").is_file()


def test_an_archive_that_is_damaged_within_is_one_line():
    archive = (world() / "mine.tar.xz").read_bytes()
    middle = len(archive) * 3 // 4
    assert "mine.tar.xz" in refused("archive", archive[:middle] + b"\xff" * 60 + archive[middle + 60 :])


def test_a_method_file_that_leaves_is_one_line():
    assert "mine.py: SystemExit" in refused("methods", b"raise SystemExit(7)")


def test_a_sound_that_is_cut_is_one_line():
    cut = (world() / "sound.wav").read_bytes()[:7105]
    assert "sound.wav is not a WAV file: it is truncated" in refused("sound", cut)


def test_an_end_that_is_no_token_is_named():
    for wrong in ("x", float("nan"), 1.5, -2, [2, None, "x"], [None], {}):
        wrong_end = json.dumps({"eos_token_id": wrong}).encode()
        assert "eos_token_id" in refused("model", wrong_end, "model/generation_config.json")


def test_a_size_of_tiles_that_is_none_is_named():
    config = json.loads((world() / "model/config.json").read_text())
    for wrong in ([336], [336, "x"], [0, 336], 7):
        wrong_size = json.dumps({**config, "image_grid_pinpoints": [[336, 336], wrong]}).encode()
        assert "image_grid_pinpoints" in refused("model", wrong_size, "model/config.json")


def test_a_layer_that_the_vision_tower_does_not_have_is_named():
    config = json.loads((world() / "model/config.json").read_text())
    for wrong in (10**9, -(10**9)):
        wrong_layer = json.dumps({**config, "vision_feature_layer": wrong}).encode()
        assert "vision_feature_layer" in refused("model", wrong_layer, "model/config.json")


def test_a_wrong_trial_names_its_sweep():
    file = KINDS["sweep"].files[0]
    wrong = yaml.safe_load((world() / file).read_text())
    wrong["parameters"]["limit"] = {"value": 0}
    assert file in refused("sweep", yaml.safe_dump(wrong).encode(), file)


def test_an_image_token_that_the_processor_does_not_write_is_named():
    config = json.loads((world() / "model/config.json").read_text())
    del config["image_token_index"]
    assert "image_token_index" in refused("model", json.dumps(config).encode(), "model/config.json")


def test_a_file_of_data_that_is_not_here_is_named_and_no_hub():
    file = KINDS["task"].files[0]
    task = re.sub(r"(?m)^( +test): .*$", r"\1: nowhere.parquet", (world() / file).read_text())
    line = refused("task", task.encode(), file)
    assert file.rpartition("/")[2] in line
    assert "there is no file 'nowhere.parquet'" in line


def test_a_processor_that_fails_is_named():
    settings = json.loads((world() / "model/processor_config.json").read_text())
    settings["image_processor"]["image_std"] = [["x", {}], 0.5, 0.5]
    assert "processor" in refused("model", json.dumps(settings).encode(), "model/processor_config.json")


@pytest.mark.parametrize(
    ("part", "wrong", "named", "reader"),
    [
        ("configs", "x", "configs is 'x'", 0),
        ("group_subtasks", {"tiny_textvqa": 7}, "group_subtasks.tiny_textvqa is 7", 4),
        ("metric_tokens", True, "metric_tokens is True", 6),
        ("results", {"tiny_textvqa": None}, "results.tiny_textvqa is None", 0),
        ("efficiency", {"tpot_s": {"median": "\x1b[31m"}}, "efficiency.tpot_s.median is '\\x1b[31m'", 4),
        ("environment", {"processes": " "}, "environment.processes is ' '", 6),
    ],
)
def test_a_cell_with_a_part_of_another_kind_is_left_out_and_named(part, wrong, named, reader):
    results = json.loads((world() / CELL / RESULTS_FILE).read_text())
    case = Case("cell's results", f"{CELL}/{RESULTS_FILE}", "", json.dumps({**results, part: wrong}).encode(), reader)
    how, said = outcome(case)
    assert how in ("ok", "refused")
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
    assert AnswerStore(tmp_path, {"cell": 1}).knows("a")
    file.write_text(file.read_text().replace("yes", "no"))
    assert not AnswerStore(tmp_path, {"cell": 1}).knows("a")
