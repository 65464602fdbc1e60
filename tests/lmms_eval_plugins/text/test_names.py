"""Which tasks are lm-evaluation-harness's, what is said where it is not installed, and what is refused."""

import argparse
from types import SimpleNamespace

import pytest

from kvcompress.errors import KVCompressError
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import names
from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.text.run import as_of_lmms_eval
from lmms_eval_plugins.text.tasks import TextTask, check_task, set_up


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(names, "lm_eval_folder", lambda: None)
    names.lm_eval_tasks.cache_clear()
    yield
    names.lm_eval_tasks.cache_clear()


@pytest.mark.parametrize("task", ["ruler", "longbench", "babilong", "lm-eval/gsm8k"])
def test_without_lm_eval_its_tasks_are_answered_with_the_command_that_brings_it(task, not_installed, capsys):
    assert evaluate.main([task, "tiny", "snapkv", "0.2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"unknown task {task!r}" in line
    assert line.endswith("-m pip install 'lm-eval[ruler,longbench]'")


def test_lm_evals_own_command_says_the_same(not_installed, capsys):
    from lmms_eval_plugins.text.__main__ import main

    assert main() == 2
    assert "-m pip install 'lm-eval[ruler,longbench]'" in capsys.readouterr().err


def test_a_name_that_both_have_is_lmms_evals_unless_it_says_otherwise():
    assert [names.is_lm_eval(name) for name in ("gsm8k", "lm-eval/gsm8k", "ruler", "tiny_textvqa")] == [
        False, True, True, False,
    ]  # fmt: skip
    assert [names.canonical(name) for name in ("lm-eval/gsm8k", "lm-eval/ruler", "gsm8k")] == [
        "lm-eval/gsm8k", "ruler", "gsm8k",
    ]  # fmt: skip


def test_a_folder_of_ones_own_is_lmms_evals_unless_the_name_says_otherwise(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    assert not names.is_lm_eval("mine", tmp_path)
    assert names.canonical("lm-eval/mine", tmp_path) == "lm-eval/mine"


def cells(*more):
    return {cell.task: cell for cell, _ in Plan.of(parse(["gsm8k,lm-eval/ruler", "m", "full", "1", *more])).cells}


def test_what_changes_answers_to_lm_evals_tasks_alone_is_a_setting_of_theirs():
    assert [cell.settings for cell in cells("--limit", "2").values()] == [{"limit": 2}, {"limit": 2}]
    found = cells("--apply_chat_template", "--metadata", '{"max_seq_lengths": [2048]}')
    assert found["gsm8k"].settings == {}
    assert found["ruler"].settings == {"apply_chat_template": True, "metadata": {"max_seq_lengths": [2048]}}


def flags(**given):
    return argparse.Namespace(**{"gen_kwargs": {}, "num_fewshot": None, "predict_only": False, **given})


def task(output_type="generate_until", **given):
    return SimpleNamespace(config=SimpleNamespace(task="t", num_fewshot=None), OUTPUT_TYPE=output_type, **given)


@pytest.mark.parametrize("output_type", ["loglikelihood", "loglikelihood_rolling", "multiple_choice"])
def test_likelihoods_are_refused_with_the_reason(output_type):
    with pytest.raises(KVCompressError, match=f"'t' has output_type {output_type}.*computed in one prefill") as error:
        check_task(task(output_type), flags())
    assert len(str(error.value).splitlines()) == 1


def test_examples_that_a_task_does_not_take_are_refused():
    with pytest.raises(KVCompressError, match="fixes num_fewshot: 0"):
        set_up(SimpleNamespace(config=SimpleNamespace(task="t", num_fewshot=0)), flags(num_fewshot=2))


def ruler_sample(doc_id, length, **scores):
    metrics = list(scores)
    return {
        "doc_id": doc_id, "doc": {"max_length": length}, "arguments": [("a prompt", {"until": []})], "filter": "none",
        "metrics": metrics, **scores,
    }  # fmt: skip


def test_rulers_metrics_of_other_lengths_are_left_out_and_means_get_their_error():
    samples = [ruler_sample(number, 2048, **{"4096": -1.0, "2048": score}) for number, score in enumerate((1.0, 0.0))]
    scores = {"4096,none": -1, "4096_stderr,none": "N/A", "2048,none": 0.5, "2048_stderr,none": "N/A", "alias": "t"}
    output = {"samples": {"t": samples}, "results": {"t": scores, "g": {"4096,none": -1, "alias": "g"}}}
    found = as_of_lmms_eval(output, TextTask("g", {"t": None}, {"g": None}))
    assert found["results"] == {"t": {"2048,none": 0.5, "2048_stderr,none": 0.5, "alias": "t"}, "g": {"alias": "g"}}
    assert [(each["arguments"], each["2048"], "4096" in each) for each in found["samples"]["t"]] == [
        (("a prompt",), 1.0, False), (("a prompt",), 0.0, False),
    ]  # fmt: skip


def test_a_tag_is_a_group_of_its_tasks():
    output = {"samples": {}, "results": {"a": {}, "b": {}}}
    found = as_of_lmms_eval(output, TextTask("tag", {"a": None, "b": None}, {}))
    assert found["group_subtasks"] == {"tag": ["a", "b"]}
