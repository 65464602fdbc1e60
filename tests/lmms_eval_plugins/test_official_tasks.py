"""lmms-eval's own tasks, untouched, with local data: what they ask for is understood, and what they score is shown."""

import http.server
import os
import threading
from pathlib import Path

import lmms_eval.api.task
import lmms_eval.tasks
import lmms_eval.utils
import pytest
import tenacity
import torch
import yaml

from kvcompress import KVCompressError
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import data
from lmms_eval_plugins.cells.results import read_cell as read
from lmms_eval_plugins.model.answering import Answering
from lmms_eval_plugins.tasks.judges import judges_keys
from lmms_eval_plugins.tiny_vlm import dataset
from tests import official_tasks_page
from tests.support.official_runs import run
from tests.support.official_tasks import local_data, official_tasks

pytestmark = pytest.mark.usefixtures("one_tiny_model", "plots_not_drawn")

OUTPUT_TYPES = {"loglikelihood", "multiple_choice", "generate_visual_cot"}  # not evaluated here


ARGUMENTS = ["tiny", "full", "1", "--data-root", "data", "--gen_kwargs", "max_new_tokens=3", "--num_fewshot", "0"]
CELL = "full-1-data=data-gen_kwargs=max_new_tokens=3-num_fewshot=0"


FINISHED = ("seedbench", "muirbench", "videomme", "gsm8k", "scienceqa", "scienceqa_img")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Questions with one image, several with placeholders in their text, a video, text alone; a group."""
    root = tmp_path_factory.mktemp("official")
    with local_data(root, *FINISHED):
        assert evaluate.main(["seedbench,muirbench,videomme,gsm8k,scienceqa_full", *ARGUMENTS]) == 0
    return root


def test_every_question_has_its_raw_answer_its_filter_and_its_measurement(finished):
    for task, filters in (
        ("seedbench", ["none"]),
        ("muirbench", ["flexible-extract"]),
        ("videomme", ["none"]),
        ("gsm8k", ["strict-match", "flexible-extract"]),
    ):
        results, samples = read(finished / "results" / task / "tiny" / CELL)
        assert results["n_questions"] == 3
        assert results["n_samples"] == 3 * len(filters)
        assert [sample["filter"] for sample in samples] == filters * 3
        for sample in samples:
            (answer,) = sample["answers"]
            assert isinstance(answer, str)
            assert sample["measurement"]["doc_id"] == sample["doc_id"]
    _, samples = read(finished / "results" / "videomme" / "tiny" / CELL)
    assert all(sample["measurement"]["vision_tokens"] > 0 for sample in samples)


def test_the_headline_is_the_metric_over_all_questions_until_another_is_chosen(finished, monkeypatch, capsys):
    folder = finished / "results" / "seedbench" / "tiny"
    results, _ = read(folder / CELL)
    questions = {"seed_video,none": 2, "seed_all,none": 3, "seed_image,none": 1}
    assert results["metric_questions"] == {"seedbench": questions}
    (table,) = folder.glob("*.md")
    assert "| seed_all |" in table.read_text()
    monkeypatch.setattr(evaluate, "load_model", None)  # a call would raise
    with local_data(finished, *FINISHED):
        assert evaluate.main(["seedbench", *ARGUMENTS, "metric=seed_video"]) == 0
        assert "| seed_video |" in table.read_text()
        assert table.read_text().splitlines()[4].endswith("| 2 of 3 |")
        assert evaluate.main(["gsm8k", *ARGUMENTS, "filter=flexible-extract"]) == 0
        (table,) = (finished / "results" / "gsm8k" / "tiny").glob("*.md")
        assert "| exact_match (flexible-extract) |" in table.read_text()
        for wrong, said in (("metric=seed_al", "mean 'seed_all'?"), ("filter=x", "has no filter 'x'; valid: none")):
            capsys.readouterr()
            assert evaluate.main(["seedbench", *ARGUMENTS, wrong, "--force"]) == 2
            assert said in capsys.readouterr().err


def test_a_group_without_a_score_of_its_own_has_that_of_its_tasks(finished):
    folder = finished / "results" / "scienceqa_full" / "tiny"
    results, samples = read(folder / CELL)
    assert results["n_questions"] == len(samples) == 6
    score = sum(sample["exact_match"] for sample in samples) / 6
    (table,) = folder.glob("*.md")
    row = table.read_text().splitlines()[4]
    assert row.startswith(f"| full | 1.000 | {100 * score:.1f} ")
    assert row.endswith("| 6 |")
    assert len(list(folder.glob("*.png"))) == 1


def test_a_task_that_asks_for_examples_which_lmms_eval_cannot_show_is_named(finished, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "load_model", None)
    with local_data(finished, *FINISHED):
        assert evaluate.main(["gsm8k", "tiny", "full", "1", "--data-root", "data"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: the file of task 'gsm8k' asks for 5 examples and names none (fewshot_config), so")


# -- what is known before the data


def c_loaded(file):
    """As yaml.full_load, by the parser in C."""

    class Loader(yaml.CSafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: node.value)
    return yaml.load(file, Loader)


def test_every_generated_task_of_lmms_eval_is_understood(monkeypatch):
    """Their output types and generation arguments, as their YAMLs have them."""
    monkeypatch.setattr(lmms_eval.utils.yaml, "full_load", c_loaded)
    names, refused = official_tasks(), {}
    assert len(names) > 1300
    for name, path in names.items():
        config = lmms_eval.utils.load_yaml_config(str(path), mode="simple")
        kwargs = {"until": ["\n\n"], **(config.get("generation_kwargs") or {})}
        output_type = config.get("output_type") or "generate_until"
        try:
            data.check_generation(name, output_type, kwargs)
        except KVCompressError as error:
            refused[name] = (output_type, str(error))
    assert {output_type for output_type, _ in refused.values()} <= OUTPUT_TYPES, refused
    assert "microvqa" not in refused
    assert "openai_math_train" not in refused
    assert refused["hellaswag"][0] == "multiple_choice"


@pytest.mark.parametrize(
    ("task", "code", "words"),
    [
        ("hellaswag", 2, ["'hellaswag'", "output_type multiple_choice", "one prefill"]),
        ("llava_in_the_wild", 1, ["'llava_in_the_wild'", "judge", "OPENAI_API_KEY", "--predict_only"]),
        ("mmbench_en_dev", 1, ["'mmbench_en_dev'", "judge", "OPENAI_API_KEY"]),
    ],
)
@pytest.mark.usefixtures("clean_process")
def test_what_cannot_be_evaluated_is_said_before_data_and_model(task, code, words, monkeypatch, capsys):
    for name in [name for name in os.environ if name.endswith("_KEY")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(evaluate, "load_model", None)
    monkeypatch.setattr(lmms_eval.api.task.datasets, "load_dataset", None)
    assert evaluate.main([task, "tiny", "full", "1"]) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words)


def test_judges_are_told_from_scorers_of_the_same_folder():
    """By the code that a score needs: beside tasks with a judge lie others that ask none."""
    for name, is_judged in (("mmbench_en_dev_static", False), ("mmbench_en_test", False), ("mmbench_cn_dev", True)):
        config = lmms_eval.utils.load_yaml_config(str(official_tasks()[name]), mode="full")
        assert (judges_keys(_Made(config)) is not None) == is_judged


class _Made:
    """What `judges_keys` looks at, of a task that is not made, for it has no data."""

    def __init__(self, config):
        self.config = type("config", (), {"task": config["task"], "process_results": config.get("process_results")})
        self._aggregations = {metric["metric"]: metric["aggregation"] for metric in config["metric_list"]}
        self._metric_fn_list = {}

    def aggregation(self):
        return self._aggregations


# -- scoring


SCORER = """
import os
import requests

def visual(doc):
    return [doc["image"]]

def score(doc, results):
    if os.environ.get("SCORER") == "broken":
        raise KeyError("colour")
    assert os.getenv("JUDGE_API_KEY")
    try:
        answer = requests.post(os.environ["JUDGE_URL"], json={"answer": results[0]}, timeout=5)
        answer.raise_for_status()
        return {"judged": 1.0}
    except Exception:  # as lmms-eval's own scorers do: a judge that cannot be reached is a score of 0
        return {"judged": 0.0}
"""


@pytest.fixture
def judged(tmp_path, small_index, clean_process, monkeypatch):
    """A task that asks a judge on this machine; the list holds the statuses that it will answer, the last for ever."""
    statuses = [200]

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("JUDGE_API_KEY", "x")
    monkeypatch.setattr(lmms_eval.api.task.ConfigurableTask.process_results.retry, "wait", tenacity.wait_none())
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "scorer.py").write_text(SCORER)
    (tmp_path / "more" / "judged.yaml").write_text(
        f"task: judged\ndataset_path: parquet\ndataset_kwargs:\n  data_files:\n    test: {dataset.COLOR}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_visual: !function scorer.visual\n"
        "doc_to_text: question\ndoc_to_target: question\nprocess_results: !function scorer.score\n"
        "generation_kwargs:\n  max_new_tokens: 3\nmetric_list:\n  - metric: judged\n    aggregation: mean\n"
        "    higher_is_better: true\n"
    )
    yield statuses
    server.shutdown()
    server.server_close()


JUDGED = ["tiny", "full", "1", "--limit", "2", "--include_path", "more"]
JUDGED_CELL = Path("results/judged/tiny/full-1-limit=2")


def test_answers_outlive_a_judge_that_fails_and_a_scorer_that_breaks(judged, monkeypatch, capsys):
    judged[:] = [500]
    assert evaluate.main(["judged", *JUDGED]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "2 requests to its judge failed" in error
    assert "HTTP 500" in error
    assert not JUDGED_CELL.exists()
    monkeypatch.setattr(evaluate, "load_model", None)  # from here on, no answer is generated

    monkeypatch.setenv("SCORER", "broken")
    assert evaluate.main(["judged", *JUDGED]) == 1
    assert "scoring failed: KeyError: 'colour'; the answers are stored" in capsys.readouterr().err
    assert not JUDGED_CELL.exists()

    monkeypatch.delenv("SCORER")
    judged[:] = [200]
    assert evaluate.main(["judged", *JUDGED]) == 0
    results, samples = read(JUDGED_CELL)
    assert results["results"]["judged"]["judged,none"] == 1
    assert results["efficiency"]["samples"] == 2
    assert results["environment"]["threads"] == torch.get_num_threads()
    assert [len(sample["answers"]) for sample in samples] == [1, 1]
    assert not list(JUDGED_CELL.parent.glob(".answers*"))
    assert evaluate.main(["judged", *JUDGED]) == 0
    assert "1 of 1 cells are complete" in capsys.readouterr().out


def test_the_other_tasks_of_a_list_run_and_the_failed_one_is_named_at_the_end(judged, monkeypatch, capsys):
    monkeypatch.delenv("JUDGE_API_KEY")
    assert evaluate.main(["judged,tiny_textvqa_color", *JUDGED]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors[0].endswith("(task judged is left out, the others continue)")
    assert errors[-1].startswith("error: 1 task(s) without results: judged (")
    assert "JUDGE_API_KEY" in errors[-1]
    assert Path("results/tiny_textvqa_color/tiny/report-limit=2.md").is_file()
    assert not Path("results/judged").exists()


def test_a_missing_or_damaged_video_is_named(tmp_path, capsys):
    clip = tmp_path / "hf/videomme/data/clip1.mp4"
    for damage, said in ((clip.unlink, "missing"), (lambda: clip.write_bytes(b"not a video"), "damaged")):
        with local_data(tmp_path, "videomme"):
            damage()
            assert evaluate.main(["videomme", *ARGUMENTS]) == 1
        error = capsys.readouterr().err
        assert error.strip().splitlines()[-1].startswith(f"error: videomme: a file of its data is {said}: ")
        assert "clip1.mp4" in error
        assert "Traceback" not in error


@pytest.mark.slow
def test_all_rounds_and_all_repetitions_of_a_question_are_kept(tmp_path):
    """Two rounds about videos; eight sampled answers, which differ."""
    with local_data(tmp_path, "ovo_forward", "aime24_nofigures_agg8"):
        assert evaluate.main(["ovo_forward,aime24_nofigures_agg8", *ARGUMENTS]) == 0
        _, rounds = read(Path("results/ovo_forward/tiny") / CELL)
        for sample in rounds:
            assert [row["round"] for row in sample["measurements"]] == [0, 1]
            assert all(row["vision_tokens"] > 0 for row in sample["measurements"])
            assert len(sample["answers"]) == 2
        results, repeated = read(Path("results/aime24_nofigures_agg8/tiny") / CELL)
        assert results["n_questions"] == 3
        for sample in repeated:
            assert len(sample["answers"]) == len(sample["measurements"]) == 8
            assert len(set(sample["answers"])) > 1


# -- many, in docs/official-tasks.md

PUBLISHED = official_tasks_page.load()
SHAPES = {
    "one image": lambda facts: facts["images"] == [1, 1],
    "several images": lambda facts: facts["images"][0] > 1,
    "a video": lambda facts: facts["videos"][0] > 0,
    "text alone": lambda facts: facts["images"] == facts["videos"] == [0, 0],
    "rounds": lambda facts: facts["rounds"][0] > 1,
    "a group": lambda facts: facts["tasks"] > 1,
    "examples": lambda facts: facts["shots"] > 0,
}


def test_the_page_is_what_its_command_writes():
    page = official_tasks_page.PAGE.read_text(encoding="utf-8")
    assert page == official_tasks_page.render(PUBLISHED), "run python -m tests.official_tasks_page"
    assert set(PUBLISHED["runs"]) == {*official_tasks_page.COMMANDS, *official_tasks_page.FAILING}


def test_at_least_25_tasks_of_all_shapes_answer_alike_alone_and_in_a_padded_batch():
    runs = {command: PUBLISHED["runs"][command] for command in official_tasks_page.COMMANDS}
    assert all(facts["equal_answers"] and facts["equal_scores"] for facts in runs.values())
    scored = [command for command, facts in runs.items() if facts["metric"] and facts["padded"] and facts["batch"] == 3]
    assert len(scored) >= 25
    for shape, has in SHAPES.items():
        assert any(has(facts) for facts in runs.values()), shape
    of_text = [command for command, facts in runs.items() if SHAPES["text alone"](facts)]
    assert {command.split()[0] for command in of_text} == {"gsm8k", "mmlu_pro_law", "openai_math_train"}
    alone = [command for command, facts in runs.items() if not facts["padded"]]
    assert all(runs[command]["rounds"][1] > 1 for command in alone), alone


@pytest.mark.slow
@pytest.mark.parametrize("command", [*official_tasks_page.COMMANDS, *official_tasks_page.FAILING])
def test_the_record_is_what_a_run_gives(command, tmp_path):
    assert run(command, tmp_path) == PUBLISHED["runs"][command]


@pytest.mark.slow
def test_what_differs_in_a_batch_is_seen(monkeypatch, tmp_path):
    """One answer that depends on its batch, and the task counts as unequal."""
    texts = Answering.texts

    def other_texts(self, new, lengths, skips):
        return [text + "!" * (len(new) > 1) for text in texts(self, new, lengths, skips)]

    monkeypatch.setattr(Answering, "texts", other_texts)
    facts = run("textvqa_val", tmp_path)
    assert (facts["batch"], facts["padded"], facts["equal_answers"]) == (3, True, False)
