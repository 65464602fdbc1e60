"""The bundled tasks through lmms-eval's own task code."""

import json
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

import kvcompress
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells.data import find_tasks
from lmms_eval_plugins.model.shared_media import SharedMedia
from lmms_eval_plugins.tasks import BUNDLED_TASKS
from lmms_eval_plugins.tasks import regimes as scoring
from lmms_eval_plugins.tasks.many import PER_PICTURE
from lmms_eval_plugins.tiny_vlm import CHECKPOINT, dataset
from lmms_eval_plugins.tiny_vlm.accuracy import Reader, by_kind
from lmms_eval_plugins.tiny_vlm.questions import POST_PROMPT
from tiny_vlm.regimes import REGIMES
from tiny_vlm.signs import SIDE

lmms_eval_tasks = pytest.importorskip("lmms_eval.tasks")
pytestmark = pytest.mark.usefixtures("clean_process", "plots_not_drawn")


@pytest.fixture(scope="module")
def tasks():
    names = ["tiny_textvqa", "tiny_textvqa_color"]
    return lmms_eval_tasks.get_task_dict(names, find_tasks(names), "chat")


def test_bundled_tasks_use_the_official_prompt_metric_and_aggregation(tasks):
    from lmms_eval.tasks.textvqa import utils

    for task in tasks.values():
        assert task.config.process_results.__code__.co_filename == utils.__file__
        doc = task.test_docs()[0]
        assert task.doc_to_text(doc) == doc["question"].capitalize() + POST_PROMPT
        assert task.process_results(doc, [doc["answers"][0].upper() + "."])["exact_match"] == 1
        assert task.process_results(doc, ["nonsense"])["exact_match"] == 0
        assert set(task.aggregation()) == {"exact_match", "submission"}
        assert task.config.generation_kwargs["max_new_tokens"] == 16


def test_bundled_tasks_hold_what_is_shipped(tasks):
    for name, file, count in (
        ("tiny_textvqa", dataset.HEADLINE, 500),
        ("tiny_textvqa_color", dataset.COLOR, 100),
    ):
        docs = tasks[name].test_docs()
        assert docs["question_id"] == pq.read_table(file)["question_id"].to_pylist()
        assert len(docs) == count
        assert tasks[name].doc_to_visual(docs[0])[0].size == (SIDE, SIDE)


@pytest.mark.parametrize("count", [2, 6, 18])
def test_questions_of_one_picture_follow_one_another_and_are_told_to_share_it(count):
    name = f"tiny_many_{count}"
    (task,) = lmms_eval_tasks.get_task_dict([name], find_tasks([name]), "chat").values()
    docs = task.test_docs()
    asked = [SimpleNamespace(args=(None, None, None, place, name, "test")) for place in range(len(docs))]
    for groups in (docs["image_id"], SharedMedia(asked, {name: {"test": docs}}).groups(asked)):
        runs = [len(list(run)) for _, run in groupby(groups)]
        assert runs == [count] * 40
        assert len(set(groups)) == 40
    assert len(set(zip(docs["image_id"], docs["question"], strict=True))) == len(docs)
    assert docs["question_id"][: count + 1] == [*range(20_000, 20_000 + count), 20_018]


def test_the_bundled_model_answers_questions_that_share_a_picture():
    examples = dataset.read_examples(dataset.MANY)[:PER_PICTURE]
    assert by_kind(examples, Reader(CHECKPOINT).answers(examples))["all"] > 90


def test_the_bundled_folder_serves_lmms_evals_include_path():
    manager = lmms_eval_tasks.TaskManager(include_defaults=False, include_path=str(BUNDLED_TASKS))
    regimes = ["tiny_multi_image", "tiny_needle", "tiny_read_all"]
    many = ["tiny_many_18", "tiny_many_2", "tiny_many_6"]
    real = ["several_instructions", "sign_presence"]
    assert manager.all_tasks == sorted([*real, *many, *regimes, "tiny_textvqa", "tiny_textvqa_color", "tiny_video"])
    assert lmms_eval_tasks.get_task_dict(["tiny_textvqa_color"], manager, "chat")


def test_official_textvqa_runs_untouched_from_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["dataset", "--as-textvqa", str(tmp_path)])
    dataset.main()
    manager = find_tasks(["textvqa_val"])
    (task,) = lmms_eval_tasks.get_task_dict(["textvqa_val"], manager, "chat").values()
    doc = task.test_docs()[0]
    assert len(task.test_docs()) == 500
    assert doc["image"].size == (SIDE, SIDE)
    assert task.process_results(doc, [doc["answers"][0]])["exact_match"] == 1


def test_only_the_folders_of_the_named_tasks_are_indexed():
    assert len(find_tasks(["tiny_textvqa", "textvqa_val"]).all_tasks) < 20


@pytest.mark.slow  # the whole index
def test_groups_and_tags_of_lmms_eval_are_found():
    assert "mmmu" in find_tasks(["mmmu", "tiny_textvqa"]).all_tasks


def test_an_unknown_task_is_one_clear_error(small_index):
    with pytest.raises(kvcompress.KVCompressError, match=r"unknown task 'tiny_textvqq'.*tiny_textvqa"):
        find_tasks(["tiny_textvqq"])


def test_each_task_runs_through_the_plugin(tmp_path, monkeypatch, small_index):
    monkeypatch.setattr(scoring, "CLIPS", tmp_path)
    names = [f"tiny_{regime}" for regime in REGIMES]
    argv = [",".join(names), "tiny", "snapkv", "0.2", "--limit", "1", "--gen_kwargs", "max_new_tokens=3"]
    assert evaluate.main(argv) == 0
    for name in names:
        assert list((tmp_path / "results").glob(f"{name}/tiny/snapkv*/results.json"))


def test_two_processes_may_write_the_same_clip(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "CLIPS", tmp_path / "clips")
    doc = {"image_list": None, "video": {"path": "a.mp4", "bytes": b"a clip"}}
    write, clips = Path.write_bytes, []

    def overtaken(file, content):
        monkeypatch.setattr(Path, "write_bytes", write)
        write(file, content)
        clips.append(scoring.doc_to_visual(doc))

    monkeypatch.setattr(Path, "write_bytes", overtaken)
    clips.append(scoring.doc_to_visual(doc))
    assert clips[0] == clips[1]
    assert [file.read_bytes() for file in (tmp_path / "clips").iterdir()] == [b"a clip"]


def test_clips_that_do_not_batch_are_answered_in_smaller_batches_as_they_are_alone(tmp_path, monkeypatch):
    answers = []
    for batch in (["batch_size=2"], []):
        assert evaluate.main(["tiny_video", "tiny", "snapkv", "0.3", "--limit", "2", *batch]) == 0
        (file,) = tmp_path.glob(
            f"results/*/*/snapkv-0.3-{''.join([*batch, '-'] if batch else [])}limit=2/samples.jsonl"
        )
        rows = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda row: row["doc_id"])
        answers.append([row["filtered_resps"] for row in rows])
    assert len(answers[0]) == 2
    assert answers[0] == answers[1]
