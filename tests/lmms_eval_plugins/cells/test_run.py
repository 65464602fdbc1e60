"""What a cell asks of lmms-eval, and notes of where it ran."""

import os
from types import SimpleNamespace

import lmms_eval.evaluator
import torch
from transformers import LlamaConfig

from lmms_eval_plugins.cells import cell_log
from lmms_eval_plugins.cells.run import as_one_process, environment, metric_tokens, run_lmms_eval
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.model.arguments import ModelArguments
from tests.support.evaluation import FOUR


def test_lmms_eval_is_told_the_model_arguments_that_were_given_and_the_flags(monkeypatch):
    asked = {}

    def evaluate(gen_kwargs, **given):
        asked.update(given, gen_kwargs=lmms_eval.evaluator.simple_parse_args_string(gen_kwargs))

    monkeypatch.setattr(lmms_eval.evaluator, "simple_evaluate", evaluate)
    flags = ["--limit", "2", "--seed", "7", "--gen_kwargs", 'top_k=3,until=a" \n,stop=007']
    plan = SimpleNamespace(request=parse([*FOUR, *flags]))
    job = SimpleNamespace(plan=plan, asked=None, cell=SimpleNamespace(task="tiny_textvqa"))
    lm = SimpleNamespace(args=ModelArguments(pretrained="m", dtype="float32"), batch_size=1, device="cpu")
    run_lmms_eval(lm, job, "folder")
    assert asked["model_args"] == {"pretrained": "m", "dtype": "float32"}
    assert (asked["tasks"], asked["limit"]) == (["tiny_textvqa"], 2)
    assert asked["gen_kwargs"] == {"top_k": 3, "until": 'a" \n', "stop": "007"}
    assert {asked[f"{name}_seed"] for name in ("random", "numpy_random", "torch_random", "fewshot_random")} == {7}


def test_tokens_of_an_answer_count_for_each_metric_that_has_a_number_for_all_its_questions():
    def line(doc_id, answer_filter, tokens, **scores):
        measured = [{"tokens_out": count} for count in tokens]
        more = {"measurements": measured} if len(measured) > 1 else {}
        return {"task": "t", "doc_id": doc_id, "filter": answer_filter, "measurement": measured[-1], **more, **scores}

    samples = [
        line(0, "none", [3], acc=1.0, video={"score": 2}, text="no number"),
        line(0, "strict", [3], acc=0.5),
        line(1, "none", [4, 5], acc=-1.0, text=1.0),
        line(1, "strict", [4, 5], acc=True),
    ]
    results = dict.fromkeys(("alias", "acc,none", "acc,strict", "acc_stderr,none", "video,none", "text,none"), 0.0)
    assert metric_tokens({"results": {"t": results}, "configs": {"t": {}}}, samples) == {
        "t": {
            "acc,none": {"tokens_out": 12, "score": 1.0},
            "acc,strict": {"tokens_out": 12, "score": 1.5},
            "video,none": {"tokens_out": 3, "score": 2.0},
        }
    }


def test_tokens_of_repeated_answers_are_those_of_one_because_one_is_scored():
    measured = [{"tokens_out": count} for count in (3, 4, 5)]
    sample = {"task": "t", "doc_id": 0, "filter": "none", "measurement": measured[-1], "measurements": measured}
    output = {"results": {"t": {"acc,none": 1.0}}, "configs": {"t": {"repeats": 3}}}
    sums = metric_tokens(output, [{**sample, "acc": 1.0}])
    assert sums == {"t": {"acc,none": {"tokens_out": 4, "score": 1.0}}}


def test_a_tensor_parallel_models_ranks_are_not_shared_out(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with as_one_process():
        assert not {"RANK", "WORLD_SIZE"} & set(os.environ)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    monkeypatch.delenv("RANK")
    with as_one_process():  # scoring stored answers needs no second process
        assert "WORLD_SIZE" not in os.environ
    assert "RANK" not in os.environ


def test_a_run_that_nobody_started_several_of_is_one_process(monkeypatch):
    config = LlamaConfig(attn_implementation="sdpa")
    lm = SimpleNamespace(device=torch.device("cpu"), model=SimpleNamespace(dtype=torch.float32, config=config))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert environment(lm)["processes"] == 1
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert environment(lm)["processes"] == 3


def test_wandbs_table_of_samples_has_every_score_that_any_question_has(monkeypatch):
    scores = [{"present": 1.0}, {"absent": 0.0}]
    samples = [{"task": "t", "doc_id": number, **score} for number, score in enumerate(scores)]
    monkeypatch.setattr(cell_log, "read_samples", lambda folder: samples)
    table = cell_log._samples(SimpleNamespace(folder=None))
    assert table.columns == ["task", "doc_id", "input", "target", "filtered_resps", "present", "absent"]
    assert [row[-2:] for row in table.data] == [[1.0, None], [None, 0.0]]
