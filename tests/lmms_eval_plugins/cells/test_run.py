"""What a cell asks of lmms-eval, and notes of where it ran."""

import os
from types import SimpleNamespace

import lmms_eval.evaluator
import torch

from lmms_eval_plugins.cells.command_line import parse
from lmms_eval_plugins.cells.run import as_one_process, environment, run_lmms_eval
from lmms_eval_plugins.model.arguments import ModelArguments

FOUR = ["tiny_textvqa", "tiny", "snapkv", "0.2"]


def test_lmms_eval_is_told_the_model_arguments_that_were_given_and_the_flags(monkeypatch):
    asked = {}
    monkeypatch.setattr(lmms_eval.evaluator, "simple_evaluate", lambda **given: asked.update(given))
    plan = SimpleNamespace(request=parse([*FOUR, "--limit", "2", "--seed", "7", "--gen_kwargs", "top_k=3,num_beams=2"]))
    job = SimpleNamespace(plan=plan, manager=None, cell=SimpleNamespace(task="tiny_textvqa"))
    lm = SimpleNamespace(args=ModelArguments(pretrained="m", dtype="float32"), batch_size=1, device="cpu")
    run_lmms_eval(lm, job, "folder")
    assert asked["model_args"] == {"pretrained": "m", "dtype": "float32"}
    assert (asked["tasks"], asked["limit"], asked["gen_kwargs"]) == (["tiny_textvqa"], 2, "top_k=3,num_beams=2")
    assert {asked[f"{name}_seed"] for name in ("random", "numpy_random", "torch_random", "fewshot_random")} == {7}


def test_a_tensor_parallel_models_ranks_are_not_shared_out(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with as_one_process():
        assert not {"RANK", "WORLD_SIZE"} & set(os.environ)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")


def test_a_run_that_nobody_started_several_of_is_one_process(monkeypatch):
    config = SimpleNamespace(_attn_implementation="sdpa")
    lm = SimpleNamespace(device=torch.device("cpu"), model=SimpleNamespace(dtype=torch.float32, config=config))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert environment(lm)["processes"] == 1
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert environment(lm)["processes"] == 3
