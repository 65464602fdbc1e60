"""Names are known from the text of files: a slip is answered before anything heavy is imported."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import kvcompress
from kvcompress import methods as core
from kvcompress.errors import KVCompressError
from kvcompress.tokens import TokenMethod
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import names
from lmms_eval_plugins.cells.names import GROUPS, asked_for, check_names, defined_in, index_of, lmms_eval_folder
from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.model.arguments import LEGACY_ARGUMENTS, ModelArguments
from lmms_eval_plugins.model.input_methods import INPUT_METHODS, method_options

from ..test_refusals import SLIPS

pytestmark = pytest.mark.usefixtures("clean_process", "plots_not_drawn")

CODE = """
import json, sys
from lmms_eval_plugins import evaluate
codes = [evaluate.main(argv) for argv in json.loads(sys.argv[1])]
heavy = [name in sys.modules for name in ("torch", "lmms_eval", "kvcompress.clusters")]
print(codes, *heavy)
"""


def test_slips_are_answered_without_heavy_imports():
    argument = json.dumps([shlex.split(words)[1:] for words, _ in SLIPS])
    done = subprocess.run([sys.executable, "-c", CODE, argument], capture_output=True, text=True)
    assert done.stdout.split() == f"{[2] * len(SLIPS)} False False False".split(), done.stderr
    for line, (_, message) in zip(done.stderr.splitlines(), SLIPS, strict=True):
        assert message in line


def test_who_names_files_with_methods_is_not_told_that_there_is_none(monkeypatch):
    request = parse(["tiny_textvqa", "tiny", "mine", "0.2", "my_option=3"])
    monkeypatch.delitem(sys.modules, "kvcompress.clusters")
    with pytest.raises(
        KVCompressError, match=r"there is no method 'mine' .is the file of your own in KVCOMPRESS_METHO"
    ):
        names.check_names(request)
    monkeypatch.setenv("KVCOMPRESS_METHODS", "mine.py")
    names.check_names(request)


def test_the_text_knows_every_method_and_argument():
    methods = sorted([*kvcompress.list_methods(), *INPUT_METHODS])
    assert names.method_names() == methods
    known = {option for method in methods for option in method_options(method)}
    assert known | set(ModelArguments.model_fields) | set(LEGACY_ARGUMENTS) | {"budget"} <= names.argument_names()


def test_a_method_whose_name_its_text_does_not_show_switches_the_check_off(tmp_path, monkeypatch):
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "mine.py").write_text("@register_method(NAME)\nclass Mine: ...\n")
    monkeypatch.setattr(names, "_package", lambda name: tmp_path)
    names.method_names.cache_clear()
    assert names.method_names() == []
    names.method_names.cache_clear()


def test_a_task_file_that_includes_itself_is_read_once(tmp_path):
    (tmp_path / "a.yaml").write_text("include: a.yaml\ntask: mine\n")
    assert index_of(tmp_path) == {"mine": ("task", tmp_path / "a.yaml")}


def test_a_task_that_was_written_meanwhile_is_known(tmp_path):
    with pytest.raises(KVCompressError, match="unknown task 'mine'"):
        names.check_tasks(["mine"], tmp_path)
    (tmp_path / "a.yaml").write_text("task: mine\n")
    names.check_tasks(["mine"], tmp_path)


# -- METHOD=all and its parts


NEED_A_FILE = {"duoattention", "fastkvzip", "kvzap", "q-filters", "sparsemm", "triattention"}


def methods(names: str, leaves_out: bool = True, more: tuple[str, ...] = ()) -> Plan:
    return Plan.of(parse(["tiny_textvqa", "tiny", names, "0.3", *more]), leaves_out)


def test_all_is_every_method_with_the_full_cache_first_and_the_two_groups_are_its_parts():
    of = {group: list(asked_for([group])) for group in GROUPS}
    assert of["all"] == ["full", *sorted(set(kvcompress.list_methods()) - {"full"})]
    assert sorted(of["all-kv"] + of["all-tokens"]) == sorted(of["all"])
    assert all(issubclass(kvcompress.list_methods()[name].cls, TokenMethod) for name in of["all-tokens"])


def test_a_method_is_asked_for_once_and_by_name_where_some_name_says_so():
    asked = asked_for(["snapkv", "all-kv", "SnapKV"])
    assert list(asked)[:2] == ["snapkv", "full"]
    assert [name for name, by_name in asked.items() if by_name] == ["snapkv"]


def test_of_all_methods_those_that_need_a_file_are_left_out_with_a_line_each(capsys):
    plan = methods("all")
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split(":")[1].removeprefix(" method ") for line in lines) == sorted(NEED_A_FILE)
    assert set(plan.request.methods) == set(kvcompress.list_methods()) - NEED_A_FILE
    assert plan.left_out == {}
    assert {cell.method for cell, _ in plan.cells} == set(plan.request.methods)


def test_an_option_of_some_goes_to_those_that_have_it():
    of_window = {cell.method for cell, _ in methods("all-kv", more=("window_size=4",)).cells if cell.options}
    assert {"snapkv", "adakv"} <= of_window
    assert "knorm" not in of_window


def test_the_words_that_no_method_may_be_called_are_those_of_an_evaluation():
    assert sorted(core.WORDS) == sorted([*GROUPS, *INPUT_METHODS])


@pytest.mark.parametrize("name", ["slots", "metric", "truncation"])
def test_an_option_of_ones_own_with_the_name_of_an_argument_is_refused(name, monkeypatch):
    """It would be taken for the argument's, or the argument for it."""
    monkeypatch.setattr(core, "_METHODS", dict(kvcompress.list_methods()))
    own = dataclasses.make_dataclass("Own", [(name, int, 3)], bases=(kvcompress.KVCluster,), frozen=True)
    kvcompress.register_method("own")(own)
    said = rf"option '{name}' of method 'own' needs another name: in an evaluation this one is taken"
    with pytest.raises(KVCompressError, match=said):
        Plan.of(parse(["tiny_textvqa", "tiny", "snapkv,own", "0.2"]))


def test_methods_that_change_the_pictures_are_asked_for_by_name_and_blind_has_one_size():
    plan = methods("full,blind,downsample,snapkv", more=("fewer_frames=true", "window_size=4", "prefill_chunk=64"))
    cells = {cell.method: cell for cell, _ in plan.cells}
    assert {method: cell.ratio for method, cell in cells.items()} == {
        "full": 1.0,
        "blind": 0.0,
        "downsample": 0.3,
        "snapkv": 0.3,
    }
    assert cells["downsample"].options == {"fewer_frames": True, "prefill_chunk": 64}
    assert cells["blind"].folder(tmp := Path("x")) == tmp / "tiny_textvqa/tiny/blind-0-prefill_chunk=64"


@pytest.mark.parametrize("asked", ["q-filters,snapkv", "snapkv,kvzap,knorm"])
def test_a_list_with_a_method_that_needs_a_file_keeps_the_others(asked):
    plan = methods(asked)
    assert list(plan.left_out) == [name for name in asked.split(",") if name in NEED_A_FILE]
    assert plan.request.methods == [name for name in asked.split(",") if name not in NEED_A_FILE]
    with pytest.raises(KVCompressError, match=r"needs calibration=|needs checkpoint="):
        methods(asked, leaves_out=False)


def test_the_groups_are_names_that_are_known_before_anything_is_imported(monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "kvcompress.clusters")
    for group in GROUPS:
        check_names(parse(["tiny_textvqa", "tiny", group, "0.3"]))
    with pytest.raises(KVCompressError, match=r"there is no method 'all-k' .did you mean 'all-kv'"):
        check_names(parse(["tiny_textvqa", "tiny", "all-k", "0.3"]))


def test_the_line_comes_first_the_others_run_and_the_exit_code_is_2(tmp_path, monkeypatch, capsys):
    assert evaluate.main(["tiny_textvqa", "tiny", "kvzap,knorm", "0.3", "--limit", "1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    reason = "error: method 'kvzap' is learned: it needs checkpoint=, a local path or a hub id"
    assert lines[0] == f"{reason} (it is left out, the others continue)"
    assert lines[-1] == reason
    assert [path.name for path in tmp_path.glob("results/*/*/*/results.json")] == ["results.json"]


def test_a_prompt_that_a_method_of_all_cannot_be_given_costs_its_cell_alone(tmp_path, monkeypatch, capsys):
    """Some keep all of a picture, or more than was asked for."""
    assert (
        evaluate.main(["tiny_textvqa", "tiny", "all-tokens", "0.2", "--limit", "1", "--gen_kwargs", "max_new_tokens=1"])
        == 0
    )
    left_out = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out: cell ")]
    refused = ["dycoke", "evs", "fastvid", "framefusion", "holitom", "pyramiddrop", "vidcom2"]
    assert [line.split()[3] for line in left_out] == [f"{name}-0.2:" for name in refused]
    done = {path.parent.name.split("-0.2")[0] for path in tmp_path.glob("results/*/*/*/results.json")}
    assert done == set(asked_for(["all-tokens"])) - set(refused)


def test_a_run_in_which_every_method_of_all_is_left_out_has_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "evaluate_cells", lambda lm, jobs, failures, log: None)
    assert evaluate.main(["tiny_textvqa", "tiny", "all-tokens", "0.2", "--limit", "1"]) == 1
    said = "error: none of the methods supports these prompts: there are no results"
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_one_that_is_asked_for_by_name_ends_the_run_as_ever(tmp_path, monkeypatch, capsys):
    assert evaluate.main(["tiny_textvqa", "tiny", "dycoke", "0.2", "--limit", "1"]) == 2
    assert "dycoke: row 0 cannot keep" in capsys.readouterr().err.splitlines()[-1]


# -- the names of tasks are those of lmms-eval's own index


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("task: a\n", {"a": "task"}),
        ('include: x\n"task" : "a"  # the first\n', {"a": "task"}),
        ("group: g\ntask:\n  # left out:\n  # - x\n- a\n- b\n", {"g": "group"}),
        ("group: 'g'\ntask: [a, b]\n", {"g": "group"}),
        ("tag: t\ntask: a\ngroup:\n  - u\n  - v\n", {"a": "task", "t": "tag", "u": "tag", "v": "tag"}),
        ("group: g\n", {}),
        ("dataset_path: x\n  task: a\n", {}),
    ],
)
def test_what_a_file_defines(text, kinds, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    assert defined_in(tmp_path / "a.yaml") == kinds


def test_what_a_file_includes_is_its_own_unless_it_says_otherwise(tmp_path):
    (tmp_path / "template").write_text("tag: t\ntask: b\n")
    (tmp_path / "a.yaml").write_text("include: template\ntask: a\n")
    assert defined_in(tmp_path / "a.yaml") == {"a": "task", "t": "tag"}


def test_tasks_groups_and_tags_of_the_installed_lmms_eval_are_found():
    found = index_of(lmms_eval_folder())
    # With a blank before the colon, a byte-order mark, comments in a list, a tag, one in a template; an ordinary one.
    for name, kind in (
        ("flickr30k_test", "task"),
        ("step2_audio_paralinguistic_pitch", "task"),
        ("wm_abench", "group"),
        ("wm_abench_subtasks", "tag"),
        ("verl_reasoning", "tag"),
        ("mmmu_val", "task"),
    ):
        assert found[name][0] == kind


@pytest.mark.slow
def test_every_name_of_lmms_evals_own_index_is_found_and_no_other():
    from lmms_eval.tasks import TaskManager

    assert index_of(lmms_eval_folder()).keys() == set(TaskManager().all_tasks)
