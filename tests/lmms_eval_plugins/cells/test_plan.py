"""Which cells a command line asks for, and which folder each has."""

from pathlib import Path

import pytest

from kvcompress import KVCompressError
from lmms_eval_plugins.cells.data import check_generation
from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.evaluate import parse
from tests.support.evaluation import FOUR


def cells(*argv):
    return [cell for cell, _ in Plan.of(parse(list(argv))).cells]


def test_cells_are_methods_times_ratios_and_full_runs_once():
    found = cells("tiny_textvqa", "tiny", "full,snapkv,knorm", "0.5,0.2")
    assert [(cell.method, cell.ratio) for cell in found] == [
        ("full", 1.0), ("snapkv", 0.5), ("snapkv", 0.2), ("knorm", 0.5), ("knorm", 0.2),
    ]  # fmt: skip


def test_budgets_make_cells_of_their_own():
    found = cells("tiny_textvqa", "tiny", "full,knorm", "-", "budget=64,128")
    assert [(cell.ratio, cell.budget) for cell in found] == [(1.0, None), (None, 64), (None, 128)]


@pytest.mark.parametrize(
    ("argv", "folders"),
    [
        (["full,fastv", "-", "preset=k2-r50"], ["full-1", "fastv-0.5"]),  # as if 0.5 was given
        (["sparsevlm", "-", "preset=192"], ["sparsevlm-budget=192"]),
        (["cake", "-", "preset=qwen2.5-7b-128"], ["cake-budget=128-decode_budget=128-tau1=0.4-tau2=0.6"]),
        (["fastv", "0.3,0.2", "preset=k2-r50"], ["fastv-0.3", "fastv-0.2"]),  # what is given goes first
        (["fastv", "-", "preset=k2-r50", "budget=9"], ["fastv-budget=9"]),
    ],
)
def test_a_preset_brings_what_is_kept_where_nothing_else_says_it(argv, folders):
    assert [cell.folder(Path()).name for cell in cells(*FOUR[:2], *argv)] == folders


def test_none_is_the_default_of_an_option_too():
    (cell,) = cells(*FOUR, "layer_budget=None", "preset=none", "window_size=8")
    assert cell.options == {"window_size": 8}


def test_every_task_of_a_list_gets_its_cells():
    assert [cell.task for cell in cells("tiny_textvqa,tiny_textvqa_color", "tiny", "knorm", "0.2")] == [
        "tiny_textvqa", "tiny_textvqa_color",
    ]  # fmt: skip


def test_an_option_belongs_to_the_methods_that_have_it():
    by_method = {cell.method: cell.options for cell in cells(*FOUR[:2], "snapkv,knorm", "0.2", "kernel_size=7")}
    assert by_method == {"snapkv": {"kernel_size": 7}, "knorm": {}}


CHANGES = [
    ["window_size=8"], ["dtype=float32"], ["max_new_tokens=4"], ["batch_size=2"], ["--limit", "3"],
    ["--gen_kwargs", "temperature=1"], ["--seed", "1"], ["--num_fewshot", "1"], ["--num_fewshot", "0"],
    ["--predict_only"], ["--data-root", "elsewhere"], ["--device", "cpu"], ["--offset", "2"], ["--repeats", "2"],
    ["--system_instruction", "Be brief."], ["--fewshot_as_multiturn"], ["--process_with_media"],
    ["--reasoning_tags", "none"], ["--batch_size", "auto"], ["--batch_size", "auto:4"],
    ["--batch_size", "auto", "--max_batch_size", "8"],
]  # fmt: skip


def test_each_setting_that_changes_answers_or_times_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    folders = [cell.folder(Path()) for change in CHANGES for cell in cells(*FOUR, *change)]
    assert len({*folders, Path("tiny_textvqa/tiny/snapkv-0.2")}) == len(CHANGES) + 1


@pytest.mark.parametrize(
    "same",
    [
        ["window_size=32", "batch_size=1", "dtype=auto", "vision_cache_gb=1", "prompt_cache_gb=3"],
        ["measurements_path=rows.jsonl", "--seed", "0,1234,1234,1234", "--offset", "0", "--repeats", "1"],
        ["--use_cache", "cache"], ["--check_integrity"], ["--write_out"], ["--show_config"], ["--timezone", "UTC"],
        ["--wandb_args", "project=p", "--wandb_log_samples"], ["--hf_hub_log_args", "push_results_to_hub=true"],
        ["--apply_chat_template"], ["--process-docs-parallel", "1"], ["--log_samples"],
    ],
)  # fmt: skip
def test_what_changes_no_answer_and_a_default_leave_the_cell_as_it_is(same):
    (cell,) = cells(*FOUR, *same)
    assert [cell] == cells(*FOUR)
    assert cell.folder(Path()) == Path("tiny_textvqa/tiny/snapkv-0.2")


def test_data_folders_of_the_same_name_have_cells_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "a/mine", "b/mine"):
        (tmp_path / name).mkdir(parents=True)
    names = {cells(*FOUR, "--data-root", name)[0].folder(Path()).name for name in ("mine", "a/mine", "b/mine")}
    assert len(names) == 3
    assert "snapkv-0.2-data=mine" in names


def test_a_long_system_prompt_is_text_and_its_folder_has_a_name(tmp_path):
    folders = [cells(*FOUR, f"system_prompt={'Be kind. ' * 500}{end}")[0].folder(tmp_path) for end in "ab"]
    assert folders[0] != folders[1]
    for folder in folders:
        folder.mkdir(parents=True)


def test_slots_are_a_setting_of_the_cell_and_take_the_place_of_the_demos_batches():
    (cell,) = cells(*FOUR, "slots=4")
    assert cell.settings == {"slots": 4}
    assert {cell.settings.get("batch_size") for cell in cells("slots=auto")} == {None}
    assert {cell.settings["batch_size"] for cell in cells()} == {4}


def test_a_task_that_does_not_go_with_slots_is_refused_before_its_data_is_loaded():
    check_generation("t", "generate_until_multi_round", {"num_beams": 2})
    check_generation("t", "generate_until", {"num_beams": 1}, slots=4)
    with pytest.raises(KVCompressError, match="slots=4 works only with tasks of a single round; task 't' has output"):
        check_generation("t", "generate_until_multi_round", {}, slots=4)
    with pytest.raises(KVCompressError, match="task 't': slots=4 does not go with num_beams=2"):
        check_generation("t", "generate_until", {"num_beams": 2}, slots=4)
