"""The launcher: every cell on one loaded model, complete results or a non-zero exit code with one clear line."""

import errno
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvcompress
from kvcompress import files
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import run as cell_run
from lmms_eval_plugins.cells.errors import EvaluationFailed
from lmms_eval_plugins.cells.results import read_cell as read
from lmms_eval_plugins.model import ranks
from lmms_eval_plugins.model.lm import KVCompressLM
from tests.support.evaluation import FOUR, ended, error_line, start

pytestmark = pytest.mark.usefixtures("clean_process", "plots_not_drawn")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three cells of two questions, run once for all tests that only read them."""
    output = tmp_path_factory.mktemp("finished")
    loads, original = [], KVCompressLM.__init__

    def counted(self, **arguments):
        loads.append(arguments)
        original(self, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCompressLM, "__init__", counted)
        patch.setenv("HF_HUB_OFFLINE", "1")
        code = evaluate.main(
            [*FOUR[:2], "full,snapkv,knorm", "0.2", "window_size=8", "--limit", "2", "--output_path", str(output)]
        )
    assert code == 0
    return output / "tiny_textvqa" / "tiny", loads


def test_all_cells_come_from_one_loaded_model(finished):
    folder, loads = finished
    assert len(loads) == 1
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        "full-1-limit=2", "knorm-0.2-limit=2", "snapkv-0.2-limit=2-window_size=8",
    ]  # fmt: skip


def test_results_hold_scores_efficiency_and_protocol(finished):
    results, _ = read(finished[0] / "snapkv-0.2-limit=2-window_size=8")
    assert 0 <= results["results"]["tiny_textvqa"]["exact_match,none"] <= 1
    assert results["efficiency"]["samples"] == results["n_samples"] == 2
    for quantity in ("ttft_s", "tpot_s", "tokens_in", "tokens_out", "vision_tokens", "kv_bytes_prompt", "kv_bytes_end"):
        assert set(results["efficiency"][quantity]) >= {"median", "p10", "p90"}
    assert results["efficiency"]["realised_ratio"]["mean"] == pytest.approx(0.2, abs=0.01)
    assert len(results["efficiency"]["realised_ratio"]["per_layer"]) > 1
    protocol = results["protocol"]
    assert (protocol["method"], protocol["ratio"], protocol["options"]["window_size"]) == ("snapkv", 0.2, 8)
    assert (protocol["scope"], protocol["ratio_of"], protocol["first_token"]) == ("prompt", "prompt", "full")
    environment, efficiency = results["environment"], results["efficiency"]
    assert environment["versions"]["lmms-eval"] == "0.7.3"
    shape = environment["config"]
    assert (shape["model_type"], shape["layers"], shape["kv_heads"], shape["head_dim"]) == ("llava_onevision", 5, 2, 48)
    assert (efficiency["images"]["median"], efficiency["videos"]["median"]) == (1, 0)


def test_every_sample_has_its_answer_and_its_measurement(finished):
    _, samples = read(finished[0] / "snapkv-0.2-limit=2-window_size=8")
    assert [sample["doc_id"] for sample in samples] == [0, 1]
    for sample in samples:
        assert isinstance(sample["filtered_resps"][0], str)
        assert sample["exact_match"] in (0, 1)
        assert sample["measurement"]["doc_id"] == sample["doc_id"]
        assert sample["measurement"]["ttft_s"] > 0
        assert sample["token_counts"][0]["output_tokens"] == sample["measurement"]["tokens_out"]


def test_table_and_plot_lie_beside_the_cells(finished):
    assert (finished[0] / "report-limit=2.png").stat().st_size > 1000
    table = (finished[0] / "report-limit=2.md").read_text()
    assert all(name in table for name in ("| full |", "| snapkv window_size=8 |", "| knorm |"))


def copy_of(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "results" / "tiny_textvqa" / "tiny")
    return tmp_path / "results" / "tiny_textvqa" / "tiny"


def test_complete_cells_are_skipped_and_force_redoes_them(finished, tmp_path, monkeypatch, capsys):
    folder = copy_of(finished, tmp_path)
    argv = [*FOUR[:2], "full,knorm", "0.2", "--limit", "2"]
    before = (folder / "knorm-0.2-limit=2" / "samples.jsonl").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "load_model", None)  # a call would raise
        assert evaluate.main(argv) == 0
    assert "2 of 2 cells are complete and skipped" in capsys.readouterr().out
    assert evaluate.main([*argv[:2], "knorm", *argv[3:], "--force"]) == 0
    assert (folder / "knorm-0.2-limit=2" / "samples.jsonl").stat().st_mtime_ns > before


def test_cut_cell_is_computed_again(finished, tmp_path, capsys):
    samples = copy_of(finished, tmp_path) / "knorm-0.2-limit=2" / "samples.jsonl"
    samples.write_text(samples.read_text().splitlines(keepends=True)[0])
    assert evaluate.main([*FOUR[:2], "full,knorm", "0.2", "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "1 of 2 cells are complete" in out
    assert "computing again: knorm-0.2-limit=2 (1 samples on disk, but 2 were evaluated)" in out
    assert len(samples.read_text().splitlines()) == 2


def test_a_disk_that_is_full_is_found_before_the_model_is_loaded(monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evaluate, "load_model", None)
    monkeypatch.setattr(files.os, "fsync", full)
    assert evaluate.main(FOUR) == 2
    assert error_line(capsys).endswith("results/tiny_textvqa/tiny' cannot be written: No space left on device")


def test_a_disk_that_becomes_full_is_one_line(monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "samples.jsonl")

    monkeypatch.setattr(cell_run, "write_cell", full)
    assert evaluate.main([*FOUR, "--limit", "1"]) == 1
    assert error_line(capsys) == "error: samples.jsonl cannot be written or read: No space left on device"
    kept = [path.name for path in Path("results/tiny_textvqa/tiny").iterdir()]
    assert kept == [".answers-snapkv-0.2-limit=1.json"]  # for the next run


@pytest.mark.slow
def test_three_identical_runs_at_once_end_well(tmp_path):
    runs = [start("evaluate", *FOUR[:2], "full,snapkv", "0.2", "--limit", "4") for _ in range(3)]
    errors = [run.communicate()[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], errors
    folder = Path("results/tiny_textvqa/tiny")
    assert {path.name for path in folder.iterdir()} == {
        "full-1-limit=4", "snapkv-0.2-limit=4", "report-limit=4.md", "report-limit=4.png", "throughput-limit=4.png",
    }  # fmt: skip
    assert all(len(read(path)[1]) == 4 for path in folder.iterdir() if path.is_dir())
    table = (folder / "report-limit=4.md").read_text()
    assert "| full |" in table
    assert "| snapkv |" in table


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("the kernel broke"), "error: RuntimeError: the kernel broke"),
        (torch.OutOfMemoryError("CUDA out of memory."), "error: not enough memory: CUDA out of memory."),
    ],
)
def test_failure_in_generate_ends_with_1_and_no_results(monkeypatch, capsys, error, line):
    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr(kvcompress.measure, "generate", broken)
    assert evaluate.main([*FOUR, "--limit", "1"]) == 1
    assert error_line(capsys) == line
    assert not list(Path("results").rglob("*.json*"))


def test_a_cell_that_fails_beside_complete_ones_is_left_out_and_the_others_continue(monkeypatch, capsys):
    original = KVCompressLM.generate_until

    def broken(self, requests):
        if self.compression.ratio == 0.1:
            raise RuntimeError("out of range")
        return original(self, requests)

    monkeypatch.setattr(KVCompressLM, "generate_until", broken)
    done = Path("results/tiny_textvqa/tiny")
    for ratios in ("0.2,0.1,0.05", "0.2,0.1,0.5"):  # then it comes before any other that is to be computed
        assert evaluate.main([*FOUR[:3], ratios, "--limit", "1"]) == 1
        said = "error: 1 cell(s) without results: tiny_textvqa/snapkv-0.1 (RuntimeError: out of range)"
        assert error_line(capsys) == said
        assert sorted(path.parent.name for path in done.glob("*/results.json")) == sorted(
            f"snapkv-{ratio}-limit=1" for ratio in {*ratios.split(","), "0.05"} - {"0.1"}
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_finished_cells_and_tidies_up(monkeypatch, capsys, number):
    original = KVCompressLM.generate_until

    def interrupted(self, requests):
        if self.compression.ratio == 0.1:
            assert list(Path("results/tiny_textvqa/tiny").glob(".unfinished-*"))
            os.kill(os.getpid(), number)
        return original(self, requests)

    monkeypatch.setattr(KVCompressLM, "generate_until", interrupted)
    assert evaluate.main([*FOUR[:3], "0.2,0.1", "--limit", "1"]) == 128 + number
    assert "finished cells are kept" in error_line(capsys)
    assert [path.name for path in Path("results/tiny_textvqa/tiny").iterdir()] == ["snapkv-0.2-limit=1"]


def test_interruption_ends_the_thread_that_prepares(monkeypatch, capsys):
    original, calls = kvcompress.measure.generate, []

    def interrupted(*args, **kwargs):
        calls.append(kwargs)
        if len(calls) == 3 + 2:  # with the warm-ups: in the second cell
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(kvcompress.measure, "generate", interrupted)
    assert evaluate.main([*FOUR[:3], "0.2,0.1", "--limit", "4", "batch_size=2", "look_ahead=2"]) == 130
    assert "finished cells are kept" in error_line(capsys)
    folder = Path("results/tiny_textvqa/tiny")
    assert [path.name for path in folder.iterdir()] == ["snapkv-0.2-batch_size=2-limit=4-look_ahead=2"]
    assert not any(thread.name.startswith("look-ahead") for thread in threading.enumerate())


def test_a_log_says_what_is_measured_and_how_far_it_is(tmp_path, monkeypatch, capsys):
    assert evaluate.main([*FOUR[:2], "full,snapkv", "0.2", "window_size=8", "--limit", "2", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "tiny_textvqa: 2 questions can detect a difference of 62.6 points" in out.partition("measuring ")[0]
    line = next(line for line in out.splitlines() if line.startswith("measuring "))
    assert line.startswith("measuring tiny_textvqa with tiny: 2 cells of 2 questions; device=cpu (")
    for part in ("dtype=float32", "attn_implementation=sdpa", "batch_size=1", "limit=2"):
        assert part in line.split()
    progress = [line for line in err.splitlines() if line.startswith("cell ")]
    assert [line.split(" · ")[:2] for line in progress] == [
        ["cell 1/2 full-1", "2/2"], ["cell 2/2 snapkv-0.2-window_size=8", "2/2"],
    ]  # fmt: skip


def test_a_grid_runs_the_vision_tower_once_per_question(finished):
    known = {}
    for folder in finished[0].iterdir():
        if folder.is_dir():
            rows = [sample["measurement"] for sample in read(folder)[1]]
            known[folder.name.split("-")[0]] = {row["vision_is_known"] for row in rows}
            assert all(0 < row["vision_s"] < row["ttft_s"] for row in rows)
    assert known == {"full": {False}, "snapkv": {True}, "knorm": {True}}
    summaries = [read(folder)[0]["efficiency"] for folder in finished[0].iterdir() if folder.is_dir()]
    assert len({json.dumps(summary["vision_s"]) for summary in summaries}) == 1


def test_lost_measurement_ends_with_1_and_no_results(monkeypatch, capsys):
    monkeypatch.setattr(KVCompressLM, "gather_rows", lambda self: self.rows[1:])
    assert evaluate.main([*FOUR, "--limit", "2"]) == 1
    assert "was not measured" in error_line(capsys)
    assert not list(Path("results").rglob("results.json"))


def test_lost_samples_are_no_complete_result():
    sample = {"doc_id": 0, "arguments": ["question"]}
    with pytest.raises(EvaluationFailed, match="t: 1 of 2 questions were answered"):
        cell_run.merge_samples({"t": [sample]}, [{"task": "t", "doc_id": 0}], {"t": {"effective": 2}}, {"t": ["none"]})


def test_all_rounds_of_a_question_are_kept_beside_each_filter():
    rows = [{"task": "t", "doc_id": 0, "round": n, "answer": f"round {n}", "tokens_out": n} for n in range(2)]
    samples = [{"doc_id": 0, "arguments": ["question"], "acc": n} for n in range(2)]
    strict, loose = cell_run.merge_samples({"t": samples}, rows, {"t": {"effective": 1}}, {"t": ["strict", "loose"]})
    assert [(line["filter"], line["acc"]) for line in (strict, loose)] == [("strict", 0), ("loose", 1)]
    for line in (strict, loose):
        assert line["answers"] == ["round 0", "round 1"]
        assert [row["tokens_out"] for row in line["measurements"]] == [0, 1]
        assert line["measurement"] == line["measurements"][-1]


def test_predict_only_writes_answers_without_scores():
    assert evaluate.main([*FOUR, "--limit", "1", "--predict_only"]) == 0
    _, samples = read(Path("results/tiny_textvqa/tiny/snapkv-0.2-limit=1-predict_only=True"))
    assert samples[0]["filtered_resps"]
    assert "exact_match" not in samples[0]


def test_the_first_rank_decides_which_cells_are_complete(monkeypatch):
    def job(todo):
        return SimpleNamespace(folder=Path("cell"), todo=todo, kept_answers=None)

    of_first, _ = evaluate._on_disk([job("there are no results")])
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(ranks, "of_each_rank", lambda found: [(of_first, {}), found])
    assert evaluate._on_disk([job(None)]) == (of_first, {}), "this rank found what the first had written since"


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_two_ranks_give_the_scores_and_measurements_of_one(tmp_path, tensor_parallel):
    """With half of the questions each, or half of the KV heads."""
    argv, runs = [*FOUR[:2], "full,snapkv", "0.2", "--limit", "7", "dtype=float32"], {}
    for processes in ("1", "2"):
        shared = ["tp_plan=auto"] if tensor_parallel and processes == "2" else []
        code, said = ended("evaluate", *argv, *shared, "--output_path", processes, NUM_PROCESSES=processes)
        assert code == 0, said
        runs[processes] = [
            read(path) for path in sorted(Path(processes, "tiny_textvqa", "tiny").iterdir()) if path.is_dir()
        ]
    for (one, one_samples), (two, two_samples) in zip(runs["1"], runs["2"], strict=True):
        assert two["environment"]["processes"] == 2
        assert one["results"] == two["results"]
        assert [s["filtered_resps"] for s in one_samples] == [s["filtered_resps"] for s in two_samples]
        # The padding request of the rank with fewer questions does not count.
        assert one["efficiency"]["samples"] == two["efficiency"]["samples"] == 7
        assert one["efficiency"]["tokens_out"] == two["efficiency"]["tokens_out"]
        assert one["efficiency"]["realised_ratio"] == two["efficiency"]["realised_ratio"]
        share = 0.5 if tensor_parallel else 1.0
        of_one, of_two = (run["efficiency"]["kv_bytes_prompt"]["median"] for run in (one, two))
        assert of_two == pytest.approx(share * of_one, rel=0.01)
