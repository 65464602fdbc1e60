"""Tasks of lm-evaluation-harness, asked of a tiny text model: its own `hf` model gives the same answers."""

import json
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import yaml

from kvcompress import KVCompressError
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells.results import read_cell as read
from lmms_eval_plugins.leaderboard.checks import problems
from lmms_eval_plugins.model.lm import KVCompressLM
from lmms_eval_plugins.model.ranks import Dealt
from tests.support.checkpoints import load_lm

pytest.importorskip("lm_eval.api.task")
pytestmark = pytest.mark.usefixtures("clean_process")

CAPITALS = {
    "task": "capitals",
    "dataset_path": "json",
    "training_split": "train",
    "fewshot_split": "train",
    "test_split": "test",
    "output_type": "generate_until",
    "num_fewshot": 2,
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["V"], "max_gen_toks": 6},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
RUN = ["full,snapkv", "0.2", "window_size=8"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a generated task, a likelihood task, and a group of both."""
    folder = tmp_path_factory.mktemp("tasks")
    files = {}
    for split, count in (("train", 3), ("test", 5)):
        docs = [{"question": f"{split} {number}? {'word ' * 20}", "answer": str(number)} for number in range(count)]
        files[split] = str(folder / f"{split}.jsonl")
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = CAPITALS | {"dataset_kwargs": {"data_files": files}}
    choice = task | {"task": "choice", "output_type": "multiple_choice", "doc_to_choice": ["a", "b"]}
    group = {"group": "both", "task": ["capitals", "choice"]}
    for content in (task, choice, group):
        name = content.get("group", content["task"])
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder


def run(tasks, checkpoint, output, *more, methods="full,snapkv"):
    size = ["0.2", "window_size=8"] if "snapkv" in methods else ["1"]
    folders = ["--include_path", str(tasks), "--output_path", str(output)]
    code = evaluate.main(["lm-eval/capitals", checkpoint("llama"), methods, *size, *folders, *more])
    (folder,) = (output / "lm-eval__capitals").iterdir()
    return code, folder


@pytest.fixture(scope="module")
def finished(tasks, checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        code, folder = run(tasks, checkpoint, output)
    assert code == 0
    return folder


def test_the_passage_is_found_in_prompts_of_text_and_its_absence_is_one_line(tasks, checkpoint, tmp_path, capsys):
    assert run(tasks, checkpoint, tmp_path, "protect_text=Question: test", "decode_ratio=0.5")[0] == 0
    capsys.readouterr()
    assert run(tasks, checkpoint, tmp_path, "protect_text=Question: train", methods="snapkv")[0] == 2
    assert "has 'Question: train' 2 times, not once" in capsys.readouterr().err.strip().splitlines()[-1]


def hf(tasks, checkpoint, **given):
    """Prompt and answer of each question, from lm-eval's own model."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": checkpoint("llama"), "dtype": "float32"},
        device="cpu",
        tasks=["capitals"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **given,
    )
    samples = sorted(found["samples"]["capitals"], key=lambda sample: sample["doc_id"])
    return [(sample["arguments"][0][0], sample["resps"][0][0]) for sample in samples]


def asked(folder):
    return [(sample["input"], sample["answers"][0]) for sample in read(folder)[1]]


def test_prompts_and_answers_are_those_of_lm_evals_own_model(finished, tasks, checkpoint):
    theirs = hf(tasks, checkpoint)
    assert asked(finished / "full-1") == theirs
    assert len({answer for _, answer in theirs}) > 1  # else the test could not fail
    assert any("V" not in answer and len(answer) < 6 for _, answer in theirs)  # one is cut at the stop string


def test_with_the_chat_template_too(tasks, checkpoint, tmp_path):
    code, folder = run(tasks, checkpoint, tmp_path, "--apply_chat_template", "--system_instruction", "Be brief.")
    theirs = hf(tasks, checkpoint, apply_chat_template=True, fewshot_as_multiturn=True, system_instruction="Be brief.")
    assert code == 0
    assert theirs[0][0].startswith("[system] Be brief.[user] ")
    (full,) = folder.glob("full-1-apply_chat_template=True-system_prompt=*")
    assert asked(full) == theirs


def test_a_cell_has_the_files_of_an_lmms_eval_cell(finished):
    results, samples = read(finished / "snapkv-0.2-window_size=8")
    assert results["efficiency"]["samples"] == results["n_samples"] == results["n_questions"] == len(samples) == 5
    assert results["efficiency"]["realised_ratio"]["mean"] == pytest.approx(0.2, abs=0.01)
    assert 0 <= results["results"]["capitals"]["exact_match,none"] <= 1
    assert results["metric_questions"] == {"capitals": {"exact_match,none": 5}}
    assert "lm-eval" in results["environment"]["versions"]
    assert [sample["doc_id"] for sample in samples] == [0, 1, 2, 3, 4]
    assert all(sample["measurement"]["tokens_in"] > 100 for sample in samples)
    assert "exact_match" in (finished / "report.md").read_text()
    assert problems(finished.parents[1]) == []


def test_complete_cells_are_skipped(finished, tasks, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "load_model", None)  # a call would raise
    code, _ = run(tasks, checkpoint, finished.parents[1])
    assert code == 0
    assert "2 of 2 cells are complete" in capsys.readouterr().out


def test_answers_of_a_run_that_was_not_scored_are_scored_without_the_model(tasks, checkpoint, tmp_path, monkeypatch):
    from lm_eval.api.task import ConfigurableTask

    score = ConfigurableTask.process_results
    monkeypatch.setattr(ConfigurableTask, "process_results", lambda *given: 1 / 0)
    assert run(tasks, checkpoint, tmp_path, "--apply_chat_template", methods="full")[0] == 1
    monkeypatch.setattr(ConfigurableTask, "process_results", score)
    monkeypatch.setattr(evaluate, "load_model", None)
    code, folder = run(tasks, checkpoint, tmp_path, "--apply_chat_template", methods="full")
    assert code == 0
    (full,) = folder.glob("full-1-*/samples.jsonl")
    assert asked(full.parent)[0][0].startswith("[user] ")


@pytest.mark.parametrize("name", ["choice", "both"])
def test_likelihood_tasks_are_refused_before_their_data_and_the_model(
    name, tasks, checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(evaluate, "load_model", None)
    argv = [f"lm-eval/{name}", checkpoint("llama"), *RUN, "--include_path", str(tasks)]
    assert evaluate.main([*argv, "--output_path", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'choice' has output_type multiple_choice" in line
    assert "one prefill" in line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--offset", "2"], "--offset does not work with lm-eval's tasks"),
        (["--num_fewshot", "2", "--fewshot_as_multiturn"], "--fewshot_as_multiturn does not work with lm-eval's tasks"),
        (["--repeats", "2"], "--repeats does not work with lm-eval's tasks"),
        (["--gen_kwargs", "top_q=1"], "top_q"),
        (["metric=bleu"], "has no metric 'bleu'"),
    ],
)
def test_what_lm_eval_has_nothing_for_is_refused(more, words, tasks, checkpoint, capsys):
    argv = ["lm-eval/capitals", checkpoint("llama"), *RUN, "--include_path", str(tasks), *more]
    assert evaluate.main(argv) == 2
    assert words in capsys.readouterr().err


def test_gen_kwargs_take_precedence_and_batches_change_no_answer(tasks, checkpoint, finished, tmp_path):
    code, folder = run(tasks, checkpoint, tmp_path, "--gen_kwargs", "max_new_tokens=2", "batch_size=2")
    assert code == 0
    (full,) = folder.glob("full-1-*")
    assert all(sample["measurement"]["tokens_out"] <= 2 for sample in read(full)[1])
    both = zip(asked(finished / "full-1"), asked(full), strict=True)
    assert all(long.startswith(short) for (_, long), (_, short) in both)


def test_a_model_without_chat_template_answers(tasks, checkpoint, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), model)
    (model / "chat_template.jinja").unlink()
    argv = ["lm-eval/capitals", str(model), "full", "1", "--include_path", str(tasks), "--limit", "1"]
    assert evaluate.main(argv) == 0
    assert evaluate.main([*argv, "--apply_chat_template"]) == 2
    assert "has no chat template" in capsys.readouterr().err


def request(number, prompt, kwargs, repeats=1):
    from lm_eval.api.instance import Instance

    return Instance("generate_until", {}, (prompt, kwargs), 0, metadata=("t", number, repeats))


def test_new_tokens_are_lm_evals_256_unless_someone_says_otherwise(checkpoint):
    from lmms_eval_plugins.text.model import LmEvalAdapter, generation_kwargs

    assert generation_kwargs({}, 256)["max_new_tokens"] == 256
    assert generation_kwargs({"max_gen_toks": 5, "until": "x"}, 256) | {"max_new_tokens": 5, "stop_strings": ["x"]} == (
        generation_kwargs({"max_gen_toks": 5, "until": "x"}, 256)
    )
    lm = load_lm(checkpoint("llama"), max_new_tokens=3)
    LmEvalAdapter(lm).generate_until([request(0, "Question", {"until": []})])
    assert lm.rows[0]["tokens_out"] <= 3


def test_each_question_keeps_its_prompt_when_ranks_exchange_questions(checkpoint, monkeypatch):
    from lmms_eval_plugins.text.model import LmEvalAdapter

    lm, asked = load_lm(checkpoint("llama")), []
    monkeypatch.setattr(lm, "generate_until", lambda made: asked.extend(made) or [SimpleNamespace(text="")] * len(made))
    prompts = ["one", "two", "the first's second"]
    made = [request(number, prompt, {}) for number, prompt in zip((0, 1, 0), prompts, strict=True)]
    made[2].idx = 1
    LmEvalAdapter(lm).generate_until(made)
    assert [lm._messages(each) for each in Dealt(asked, prompts, 0).requests] == prompts


def test_a_likelihood_is_no_request_for_this_model():
    from lmms_eval_plugins.text.model import LmEvalAdapter

    lm = LmEvalAdapter(SimpleNamespace(device="cpu", world_size=1))
    for ask in (lm.loglikelihood, lm.loglikelihood_rolling):
        with pytest.raises(KVCompressError, match="one prefill"):
            ask([])


def test_the_entry_point_names_the_model():
    from lmms_eval_plugins.text.__main__ import MODEL
    from lmms_eval_plugins.text.model import KVCompressTextLM

    settings = (Path(evaluate.__file__).parents[1] / "pyproject.toml").read_text()
    assert re.search(rf'entry-points."lm_eval.models".*\nkvcompress = "{MODEL}"', settings)
    assert pkgutil.resolve_name(MODEL) is KVCompressTextLM


@pytest.mark.slow
def test_lm_evals_own_command(tasks, checkpoint, tmp_path):
    arguments = f"pretrained={checkpoint('llama')},method=snapkv,ratio=0.2,window_size=8,dtype=float32"
    argv = ["run", "--model", "kvcompress", "--model_args", arguments, "--tasks", "capitals"]
    argv += ["--include_path", str(tasks), "--output_path", str(tmp_path / "out"), "--log_samples"]
    subprocess.run([sys.executable, "-m", "lmms_eval_plugins.text", *argv], check=True, capture_output=True, text=True)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["capitals"]["sample_len"] == 5


@pytest.mark.slow
def test_two_processes_share_the_questions(tasks, checkpoint, finished, tmp_path, monkeypatch):
    monkeypatch.setenv("NUM_PROCESSES", "2")
    code, folder = run(tasks, checkpoint, tmp_path)
    assert code == 0
    cells = list(folder.glob("*/results.json"))
    assert len(cells) == 2
    for cell in cells:
        assert asked(cell.parent) == asked(finished / cell.parent.name)


@pytest.mark.slow
def test_rulers_needles_are_made_and_found_offline(checkpoint, tmp_path):
    argv = ["niah_single_1", checkpoint("llama"), *RUN, "--metadata", '{"max_seq_lengths": [1024]}', "--limit", "2"]
    assert evaluate.main([*argv, "--gen_kwargs", "max_new_tokens=4", "--output_path", str(tmp_path)]) == 0
    (cell,) = tmp_path.glob("niah_single_1/*/snapkv*")
    results, samples = read(cell)
    assert set(results["results"]["niah_single_1"]) >= {"1024,none", "1024_stderr,none"}
    assert "4096,none" not in results["results"]["niah_single_1"]
    assert all(800 < sample["measurement"]["tokens_in"] <= 1024 for sample in samples)


def test_one_loaded_model_answers_all_cells(tasks, checkpoint, tmp_path, monkeypatch):
    loads, original = [], KVCompressLM.__init__

    def counted(self, *given, **arguments):
        loads.append(arguments)
        original(self, *given, **arguments)

    monkeypatch.setattr(KVCompressLM, "__init__", counted)
    assert run(tasks, checkpoint, tmp_path, "--limit", "1")[0] == 0
    assert len(loads) == 1
