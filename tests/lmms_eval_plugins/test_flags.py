"""lmms-eval's flags in a run of the command: what they show, keep and send."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import cell_log, machine
from lmms_eval_plugins.cells.results import read_cell as read
from lmms_eval_plugins.model.lm import KVCompressLM
from tests.support.evaluation import FOUR, error_line

pytestmark = pytest.mark.usefixtures("clean_process", "plots_not_drawn")

CELL = Path("results/tiny_textvqa/tiny/snapkv-0.2-limit=2")


def run(*argv, words=FOUR):
    return evaluate.main([*words, "--limit", "2", *argv])


# -- before the model loads, and at the end


def test_first_prompt_target_and_tokens_are_shown_and_the_tasks_configuration(monkeypatch, capsys):
    assert run("--write_out", "--show_config", "--check_integrity", "--timezone", "Asia/Tokyo") == 0
    out = capsys.readouterr().out
    results, samples = read(CELL)
    row = samples[0]["measurement"]
    text = row["tokens_in"] - row["vision_tokens"]
    shown = f"--- tiny_textvqa, question 0: {row['tokens_in']} tokens: {text} text, {row['vision_tokens']} vision"
    assert shown in out.splitlines()
    assert samples[0]["input"] in out[out.index(shown) :]
    assert "<image>" in out[out.index(shown) :]
    assert "\n--- target: " in out
    assert "checked tiny_textvqa: 2 questions with 2 images can be read" in out
    shown = json.loads(out[out.index("\n{") : out.rindex("}") + 1])
    assert shown["tiny_textvqa"]["task"] == "tiny_textvqa"
    assert shown == results["configs"]
    assert results["date"].endswith("+09:00")
    # All of it again where nothing has to be computed, without the model.
    monkeypatch.setattr(evaluate, "load_model", None)
    assert run("--write_out", "--show_config", "--check_integrity") == 0
    again = capsys.readouterr().out
    assert "1 of 1 cells are complete and skipped" in again
    for part in (f"text, {row['vision_tokens']} vision", '"task": "tiny_textvqa"', "checked tiny_textvqa"):
        assert part in again


def test_a_question_that_cannot_be_read_is_named_before_the_model_loads(monkeypatch, capsys):
    from lmms_eval.api.task import ConfigurableMessagesTask

    def doc_to_messages(self, doc):
        raise OSError("image file is truncated (3 bytes not processed)")

    monkeypatch.setattr(ConfigurableMessagesTask, "doc_to_messages", doc_to_messages)
    monkeypatch.setattr(evaluate, "load_model", None)
    assert run("--check_integrity") == 2
    assert error_line(capsys) == (
        "error: task 'tiny_textvqa': 2 of 2 questions cannot be read: question 0: OSError: image file is truncated "
        "(3 bytes not processed); question 1: OSError: image file is truncated (3 bytes not processed)"
    )


def test_the_questions_behind_an_offset_are_answered():
    assert run("--offset", "3") == 0
    _, samples = read(CELL.with_name("snapkv-0.2-limit=2-offset=3"))
    assert [sample["doc_id"] for sample in samples] == [3, 4]
    assert [sample["measurement"]["doc_id"] for sample in samples] == [3, 4]


def test_an_automatic_batch_size_runs_and_is_named(capsys):
    assert run("--batch_size", "auto:2", "--max_batch_size", "1", "--repeats", "2") == 0
    results, _ = read(only_cell())
    assert results["protocol"]["settings"]["batch_size"] == "auto:2"
    assert results["config"]["batch_sizes"] == [1, 1]
    out, err = capsys.readouterr()
    assert "of batches of up to auto:2" in " ".join(out.split())
    assert " · 4/4 · " in err  # two answers to each question


def only_cell():
    (file,) = Path("results").rglob("results.json")
    return file.parent


# -- answers of earlier runs


def test_a_lost_cell_is_made_of_earlier_answers_and_another_identity_is_not(tmp_path, monkeypatch):
    cache = ["--use_cache", str(tmp_path / "cache"), "batch_size=2"]
    answered, original = [], KVCompressLM._answer

    def counted(self, requests, batch):
        answered.append(len(requests))
        return original(self, requests, batch)

    monkeypatch.setattr(KVCompressLM, "_answer", counted)
    assert run(*cache) == 0
    first = read(CELL.with_name("snapkv-0.2-batch_size=2-limit=2"))
    assert answered == [2]
    assert run(*cache, "--output_path", "elsewhere") == 0
    second = read(Path("elsewhere", *CELL.parts[1:-1], "snapkv-0.2-batch_size=2-limit=2"))
    assert answered == [2]
    assert second[1] == first[1]
    assert second[0]["efficiency"] == first[0]["efficiency"]
    assert run(*cache, "window_size=8") == 0
    assert answered == [2, 2]


# -- what goes elsewhere


@pytest.fixture
def hub(monkeypatch):
    """A hub that is there, and what was sent to it."""
    sent = []

    class Api:
        def whoami(self):
            return {"name": "me"}

        def create_repo(self, repository, **settings):
            sent.append(("create", repository, settings["private"]))

        def update_repo_settings(self, repository, **settings):
            sent.append(("gate", repository, settings["gated"]))

        def upload_file(self, path_or_fileobj, path_in_repo, repo_id, **settings):
            assert Path(path_or_fileobj).is_file()
            sent.append(("file", repo_id, path_in_repo))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    monkeypatch.setattr(cell_log, "is_offline", lambda: False)
    monkeypatch.setattr(cell_log, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(machine, "hub_is_reachable", lambda: True)
    return SimpleNamespace(sent=sent, api=Api)


def test_results_and_answers_are_pushed_also_of_a_cell_that_was_complete(hub):
    place = "tiny_textvqa/tiny/snapkv-0.2-limit=2/"
    assert run("--hf_hub_log_args", "push_results_to_hub=true") == 0
    assert hub.sent == [
        ("create", "me/lmms-eval-results-private", True),
        ("file", "me/lmms-eval-results-private", place + "results.json"),
    ]
    hub.sent.clear()
    push = "push_samples_to_hub=true,hub_results_org=lab,details_repo_name=answers,public_repo=true,gated=true"
    assert run("--hf_hub_log_args", push) == 0
    assert hub.sent == [
        ("create", "lab/answers", False), ("gate", "lab/answers", "auto"),
        ("file", "lab/answers", place + "samples.jsonl"),
    ]  # fmt: skip


def test_a_cell_that_the_hub_refuses_keeps_its_results_and_ends_with_1(hub, monkeypatch, capsys):
    def refuse(self, *args, **settings):
        raise OSError("403 Forbidden")

    monkeypatch.setattr(hub.api, "create_repo", refuse)
    assert run("--hf_hub_log_args", "push_results_to_hub=true") == 1
    captured = capsys.readouterr()
    assert "not logged: snapkv-0.2-limit=2: the hub refused the upload: OSError: 403 Forbidden" in captured.out
    assert captured.err.splitlines()[-1].startswith("error: 1 complete cells could not be logged")
    assert (CELL / "results.json").is_file()


@pytest.mark.parametrize(("token", "words"), [(None, "HF_TOKEN"), ("hf_token", "HF_HUB_OFFLINE")])
def test_nothing_starts_where_nothing_could_be_pushed(token, words, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    monkeypatch.setattr(evaluate, "load_model", None)
    assert run("--hf_hub_log_args", "push_results_to_hub=true") == 1
    assert words in error_line(capsys)


def test_each_cell_is_a_run_of_wandb_offline_without_an_account(monkeypatch, tmp_path):
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(wandb, "api", SimpleNamespace(api_key=None))
    runs = []

    class Run:
        def __init__(self, settings):
            self.settings, self.config, self.logged = settings, SimpleNamespace(update=self.update), {}

        def update(self, values, **settings):
            self.values = values

        def log(self, values):
            self.logged |= values

        def log_artifact(self, artifact):
            self.artifact = artifact

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            return None

    def init(project=None, name=None, id=None, group=None, job_type=None, dir=None, mode=None, tags=None, config=None):
        runs.append(Run({"project": project, "name": name, "id": id, "mode": mode, "tags": tags}))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", init)
    words = [*FOUR[:2], "full,snapkv", "0.2"]
    assert run("--wandb_args", "project=2024,name=mine,tags=a+b", "--wandb_log_samples", words=words) == 0
    assert [each.settings["name"] for each in runs] == ["mine-full-1-limit=2", "mine-snapkv-0.2-limit=2"]
    assert {(each.settings["project"], each.settings["mode"]) for each in runs} == {("2024", "offline")}
    assert runs[0].settings["tags"] == ["a", "b"]
    assert runs[0].settings["id"] != runs[1].settings["id"]
    results, _ = read(CELL)
    assert runs[1].logged["accuracy"] == results["results"]["tiny_textvqa"]["exact_match,none"]
    assert runs[1].logged["ttft_s"] == results["efficiency"]["ttft_s"]["median"]
    table = runs[1].logged["samples"]
    assert table.columns == ["task", "doc_id", "input", "target", "filtered_resps", "exact_match"]
    assert [row[1] for row in table.data] == [0, 1]
    assert len({each.artifact.name for each in runs}) == 2
    assert {each.artifact.type for each in runs} == {"results"}
    place = "tiny_textvqa/tiny/snapkv-0.2-limit=2"
    assert sorted(runs[1].artifact.manifest.entries) == [f"{place}/results.json", f"{place}/samples.jsonl"]
    ids = [each.settings["id"] for each in runs]
    runs.clear()  # what was complete is logged as the same runs
    assert run("--wandb_args", "project=p,mode=disabled", words=words) == 0
    assert [each.settings["id"] for each in runs] == ids
    assert runs[0].settings["mode"] == "disabled"


def test_a_cell_that_wandb_refuses_keeps_its_results_and_ends_with_1(capsys):
    assert run("--wandb_args", "mode=of-line") == 1
    captured = capsys.readouterr()
    assert "not logged: snapkv-0.2-limit=2: wandb: " in captured.out
    assert "mode" in captured.out
    assert captured.err.splitlines()[-1].startswith("error: 1 complete cells could not be logged")
    assert (CELL / "results.json").is_file()


@pytest.mark.slow
def test_wandb_itself_writes_an_offline_run_for_each_cell(monkeypatch, tmp_path):
    import wandb

    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    wandb.teardown()
    code = run("--wandb_args", "project=p", "--wandb_log_samples", words=[*FOUR[:2], "full,snapkv", "0.2"])
    wandb.teardown()
    logging.getLogger("wandb").handlers.clear()
    assert code == 0
    assert len(list(Path("results/wandb").glob("offline-run-*"))) == 2


# -- lists


def test_lists_of_tasks_methods_and_models(capsys):
    for argv, expected, other in (
        (["tasks", "tiny_textvqa"], "tiny_textvqa ", "docvqa"),
        (["tasks", "flickr30k_test"], "flickr30k_test ", "tiny"),
        (["methods"], "snapkv ", "tiny_textvqa"),
        (["models", "qwen2_5_vl"], "qwen2_5_vl ", "gemma3"),
        (["models", "bundled"], "tiny ", "qwen"),
        (["models"], "qwen2_5_vl ", "mamba"),
        (["models", "model_type: text"], "llama ", "bert"),
    ):
        assert evaluate.main(["list", *argv]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith(expected) for line in lines)
        assert not any(other in line for line in lines)


# -- Apple's GPU


def test_mps_runs_where_torch_has_it_and_is_one_line_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert run("device=mps") == 1
    assert error_line(capsys).startswith("error: device 'mps' was requested, but torch")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    machine.check_device("mps", 1)
