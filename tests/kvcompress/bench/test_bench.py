"""`python -m kvcompress bench`: its arithmetic, its turns, its command line, and what it asks of kvpress' process."""

import importlib
import io
import itertools
import json
import os
import signal
import statistics
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import kvcompress
from kvcompress.__main__ import main
from kvcompress.bench import command, comparison, contenders, grid, report, standalone, throughput, timing
from kvcompress.bench.contenders import KVPress, KVPressProcess, MethodSpec, Ours, Transformers, Turn, Workload
from kvcompress.bench.results import check_measured
from kvcompress.bench.shapes import SHAPES, source
from kvcompress.bench.timing import summary
from kvcompress.policy.make import make_policy
from tests.support.clock import synchronised_reads
from tests.support.families import MORE_FAMILIES

MODEL = standalone.load({"config": SHAPES["tiny"]}, "float32", torch.device("cpu"))
ROOT = Path(__file__).parents[3]
QUICK = ["--shape", "tiny", "--lengths", "32", "--new", "2", "--repeats", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Copying 256 MiB ten times takes seconds, and a plot takes one."""
    copy = grid.copy_bandwidth
    monkeypatch.setattr(grid, "copy_bandwidth", lambda device, clock: copy(device, 1 << 16, clock))
    monkeypatch.setattr(comparison, "plot", lambda content, rows, file: file.touch())


def bench(tmp_path, *arguments: str) -> dict:
    """What a quick run wrote."""
    assert main(["bench", *QUICK, "--out", str(tmp_path / "bench"), *arguments]) == 0
    return json.loads((tmp_path / "bench.json").read_text())


# Arithmetic


def test_summary_is_median_and_quartiles():
    assert summary([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3, "q1": 2, "q3": 4, "repeats": 5}
    assert summary([7.0]) == {"median": 7, "q1": 7, "q3": 7, "repeats": 1}


def test_growth_is_the_exponent_of_the_length():
    def row(length: int) -> dict:
        median = {name: {"median": length**power} for name, power in (("prompt_ms", 2), ("decode_ms", 0))}
        return {"batch": 1, "way": "full", "length": length, **median, "scoring_ms": None, "kv_bytes": 5 * length}

    (found,) = report.growth([row(512), row(1024), row(4096)])
    slopes = found["prompt_ms"], found["decode_ms"], found["kv_bytes"], found["scoring_ms"]
    assert slopes == (pytest.approx(2), pytest.approx(0), pytest.approx(1), None)
    assert report.growth([row(512)]) == []
    assert "| 1 | full | 2.00 |  | 0.00 | 1.00 |" in report.growth_table([row(512), row(1024)])


def test_scoring_is_timed_where_it_happens_and_only_in_the_prompt(monkeypatch):
    monkeypatch.setitem(standalone.CLOCKS, "wall", itertools.count().__next__)
    cache = MethodSpec("snapkv", 0.2).cache(MODEL.config, room=4)
    timer = contenders.ScoringTimer(cache, MODEL.device, "wall")
    with kvcompress.attach(MODEL):
        MODEL(standalone.prompt_ids(MODEL, 1, 32), past_key_values=cache)
        timer.stop()
        spans = timer.milliseconds()
        MODEL(standalone.prompt_ids(MODEL, 1, 1), past_key_values=cache)
    assert spans == 1e3 * (MODEL.config.num_hidden_layers + 1)  # every layer, and `finish`
    assert timer.milliseconds() == spans


def test_on_cuda_scoring_is_timed_on_the_model_s_stream_whichever_device_is_current(monkeypatch):
    recorded = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            recorded.append(stream)

        def elapsed_time(self, end):
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    cache = MethodSpec("snapkv", 0.2).cache(MODEL.config, room=4)
    timer = contenders.ScoringTimer(cache, torch.device("cuda", 1), "wall")
    with kvcompress.attach(MODEL):
        MODEL(standalone.prompt_ids(MODEL, 1, 32), past_key_values=cache)
        timer.stop()
    assert timer.milliseconds() == 1.5 * len(recorded) / 2
    assert set(recorded) == {"stream of cuda:1"}


def measured(prompt_ms: float, step_ms: float, scoring_ms: float | None = None, turns: int = 2) -> dict:
    """Turns on a machine that gets slower: it needs these times in the first turn, twice as long in the second."""
    fixed = {"kv_bytes": 4_000_000, "peak_bytes": None}
    scoring = [None if scoring_ms is None else turn * scoring_ms for turn in range(1, turns + 1)]
    return {
        "turns": [
            {"prompt_ms": turn * prompt_ms, "step_ms": [turn * step_ms], "scoring_ms": part, **fixed}
            for turn, part in enumerate(scoring, 1)
        ]
    }


def test_a_row_compares_turn_by_turn_and_with_the_limits_of_memory():
    ways = {"transformers DynamicCache": measured(200, 26), "kvpress snapkv": measured(90, 13)}
    cell = {"length": 64, "batch": 2, "copy_bytes_per_s": 10e9, "ways": {"snapkv": measured(103, 10, 3), **ways}}
    content = {"cells": [cell], "largest": [], "weight_bytes_read": 56_000_000, "weight_bytes": 60_000_000}
    row, *peers = report.rows_of(content, memory_limit=100_000_000)
    assert row["scoring_share"]["median"] == pytest.approx(3 / 100)
    assert row["prompt_speedup_dynamic"]["median"] == pytest.approx(200 / 103)
    assert row["speedup_dynamic"]["median"] == pytest.approx(2.6)
    assert row["speedup_kvpress"]["median"] == pytest.approx(1.3)
    assert [peer["speedup_dynamic"] for peer in peers] == [None, None]
    assert row["bandwidth_fraction"] == pytest.approx(0.006 / 0.015)  # 60 MB at 10 GB/s; a step takes 10 or 20 ms
    assert row["largest_batch"] == 20  # beside one copy of the weights, 2 MB each
    assert report.rows_of(content, memory_limit=50_000_000)[0]["largest_batch"] == 0


def test_a_single_turn_makes_a_row_whose_scoring_is_a_percentage():
    cell = {"length": 64, "batch": 1, "copy_bytes_per_s": 10e9, "ways": {"full": measured(250, 10, 50, turns=1)}}
    (row,) = report.rows_of({"cells": [cell], "largest": [], "weight_bytes_read": 36_000_000})
    shown = dict(zip(report.HEADER, report.cells_of(row, spread=False), strict=True))
    assert (shown["prefill ms"], shown["scoring %"], shown["of the limit"]) == ("250", "25", "0.40")
    assert dict(zip(report.HEADER, report.cells_of(row), strict=True))["scoring %"] == "25 (25-25)"


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 31, 32, 100])
def test_largest_batch_is_found(limit):
    tried = []
    assert grid.largest_batch(lambda batch: tried.append(batch) or batch <= limit) == limit
    assert len(tried) <= 15


def test_weights_read_leave_out_an_input_table_of_its_own():
    tied = sum(weight.numel() * 4 for weight in MODEL.parameters())
    assert comparison.weight_bytes_read(MODEL) == tied
    untied = standalone.load({"config": SHAPES["tiny"] | {"tie_word_embeddings": False}}, "float32", MODEL.device)
    assert comparison.weight_bytes_read(untied) == tied
    assert sum(weight.numel() * 4 for weight in untied.parameters()) == tied + 512 * 64 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_measured_in_the_dtype_asked_for(dtype, tmp_path):
    MODEL.save_pretrained(tmp_path)
    assert standalone.load({"pretrained": str(tmp_path)}, dtype, MODEL.device).dtype == getattr(torch, dtype)


def test_copy_bandwidth_counts_reading_and_writing(monkeypatch):
    now = iter(range(100))
    monkeypatch.setitem(standalone.CLOCKS, "wall", lambda: next(now))
    assert grid.copy_bandwidth(torch.device("cpu"), clock="wall") == 2 * (1 << 16)


# Turns


def test_the_greedy_loop_gives_the_tokens_of_generate():
    ids = standalone.prompt_ids(MODEL, 2, 40)
    expected = MODEL.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)[:, 40:]
    seen, positions = [], []

    def step(token, **kwargs):
        seen.append(token)
        positions.append(kwargs["position_ids"].tolist())
        return MODEL(token, **kwargs)

    cache = DynamicCache(config=MODEL.config)
    token, _ = standalone.read_prompt(MODEL, cache, ids, "wall")
    assert len(standalone.decode(step, cache, token, 40, 6, "wall")) == 6
    assert torch.equal(torch.cat(seen, 1), expected)
    assert positions == [[[column]] * 2 for column in range(40, 46)]


def test_only_the_last_token_of_a_prompt_gets_logits():
    """Those of a whole prompt take more memory than its cache."""
    seen = []
    with MODEL.lm_head.register_forward_hook(lambda _, args, output: seen.append(output.shape[1])):
        standalone.read_prompt(MODEL, DynamicCache(config=MODEL.config), standalone.prompt_ids(MODEL, 2, 40), "wall")
    assert seen == [1]


def test_times_are_split_into_prompt_and_steps(monkeypatch):
    """A model that needs 50 ms for the prompt and 20 ms per token, on a clock that only it advances."""
    now = [100.0]
    monkeypatch.setitem(standalone.CLOCKS, "wall", lambda: now[0])

    def tick(_, args, output):
        now[0] += 0.05 if args[0].shape[1] > 1 else 0.02

    with MODEL.register_forward_hook(tick):
        turn = Transformers(MODEL, "DynamicCache").turn(Workload(16, 1, 3, "wall"))
    assert turn.prompt_ms == pytest.approx(50)
    assert turn.step_ms == pytest.approx([20, 20, 20])


def test_bytes_are_those_that_the_caches_hold():
    workload = Workload(100, 2, 4, "wall")
    entry = 2 * 2 * 2 * 16 * 4  # layers x KV heads x (key and value) x head_dim x fp32
    assert Transformers(MODEL, "DynamicCache").turn(workload).kv_bytes == 2 * 104 * entry
    assert Transformers(MODEL, "StaticCache").turn(workload).kv_bytes == 2 * 104 * entry
    ours = Ours(MODEL, MethodSpec.parse("snapkv", 0.1)).turn(workload).kv_bytes
    assert 2 * 14 * entry <= ours < 2 * 20 * entry


@pytest.mark.parametrize("family", ["qwen3.5", "mllama", "gemma4-e2b"])
def test_layers_without_keys_of_their_own_count_as_those_of_our_cache_do(family):
    model, workload = MORE_FAMILIES[family].build(), Workload(12, 2, 2, "wall")
    ours = Ours(model, MethodSpec.parse("full", None)).turn(workload).kv_bytes
    for kind in ("DynamicCache", "StaticCache"):
        theirs = Transformers(model, kind).turn(replace(workload, steps=3)).kv_bytes  # ours has room for one more
        assert theirs == ours


class Scripted:
    """A contender that notes its turns and fails where it is told to."""

    def __init__(self, name, log, fails_at=None, holds_memory=False):
        self.name, self.log, self.fails_at, self.holds_memory = name, log, fails_at, holds_memory

    def let_go(self):
        self.log.append(f"({self.name})")

    def turn(self, workload):
        self.log.append(self.name)
        if self.log.count(self.name) == self.fails_at:
            raise torch.OutOfMemoryError("out of memory")
        return Turn(1.0 * len(self.log), [1.0], 10, None)


def test_contenders_take_turns_and_each_begins_once():
    log = []
    taken = grid.measure_cell({n: Scripted(n, log) for n in "abc"}, Workload(8, 1, 1, "wall"), 3)
    assert "".join(log) == "abc" + "bca" + "cab" + "abc"
    assert [turn["prompt_ms"] for turn in taken["a"]["turns"]] == [6, 8, 10]  # the warm-up is not counted


def test_what_holds_memory_from_turn_to_turn_takes_its_turns_after_the_others_and_lets_go():
    log = []
    contenders = {n: Scripted(n, log, holds_memory=n in "ac") for n in "abcd"}
    taken = grid.measure_cell(contenders, Workload(8, 1, 1, "wall"), 2)
    assert "".join(log) == "bd" + "db" + "bd" + "aaa(a)" + "ccc(c)"
    assert all(len(way["turns"]) == 2 for way in taken.values())


def test_a_compiled_static_cache_is_freed_when_its_turns_are_over():
    ours, theirs = Transformers(MODEL, "DynamicCache"), Transformers(MODEL, "StaticCache", compiled=True)
    assert (ours.holds_memory, theirs.holds_memory) == (False, True)
    theirs._static = Workload(8, 1, 1, "wall"), None
    theirs.let_go()
    assert theirs._static is None


def test_a_contender_that_runs_out_of_memory_leaves_the_others_in_the_race(monkeypatch):
    log, released = [], []
    monkeypatch.setattr(grid, "release_memory", lambda: released.append(log[-1]))
    taking_part = {"a": Scripted("a", log), "b": Scripted("b", log, fails_at=2)}
    taken = grid.measure_cell(taking_part, Workload(8, 1, 1, "wall"), 2)
    assert taken["b"] == {"error": "out of memory"}
    assert len(taken["a"]["turns"]) == 2
    assert log.count("b") == 2
    assert released == ["b"]


STATIC_SNAPKV = MethodSpec.parse("snapkv:cache_implementation=static", 0.2)


@pytest.mark.parametrize(
    "contender",
    [
        Transformers(MODEL, "DynamicCache"),
        Transformers(MODEL, "StaticCache"),
        Ours(MODEL, MethodSpec.parse("adakv", 0.2)),
        Ours(MODEL, STATIC_SNAPKV),
    ],
    ids=lambda contender: contender.name,
)
def test_one_prompt_is_read_once_and_its_cache_repeated(contender):
    shapes = []
    hook = MODEL.model.register_forward_hook(
        lambda _, args, kwargs, output: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with hook:
        turn = contender.turn(Workload(50, 5, 2, "wall", one_prompt=True))
        contender.turn(Workload(50, 5, 2, "wall"))
    assert shapes == [(1, 50), (5, 1), (5, 1), (5, 50), (5, 1), (5, 1)], "unless it is asked for, every row is read"
    assert turn.kv_bytes == pytest.approx(
        5 * contender.turn(Workload(50, 1, 2, "wall")).kv_bytes, rel=0.03
    )  # a cursor is one for all rows


@pytest.mark.parametrize("contender", [Transformers(MODEL, "StaticCache"), Ours(MODEL, STATIC_SNAPKV)])
def test_the_rows_of_a_repeated_static_cache_answer_as_they_would_alone(contender, monkeypatch):
    told = []
    monkeypatch.setattr(
        contenders, "decode", lambda step, cache, token, *rest: told.append((step, cache, token)) or [1.0] * rest[1]
    )
    for batch in (1, 3):
        contender.turn(Workload(50, batch, 2, "wall", one_prompt=True))
    with torch.no_grad(), kvcompress.attach(MODEL) if isinstance(contender, Ours) else nullcontext():
        alone, together = (
            step(token, position_ids=torch.full_like(token, 50), past_key_values=cache).logits
            for step, cache, token in told
        )
    torch.testing.assert_close(together, alone.expand_as(together), atol=1e-5, rtol=0)


def test_a_static_cache_is_the_same_in_every_turn_of_a_workload_only_where_a_compiled_graph_counts_on_it():
    workload, larger = Workload(20, 1, 2, "wall"), Workload(30, 2, 2, "wall")
    kept = Transformers(MODEL, "StaticCache", compiled=True)
    kept.answer = lambda cache, held, asked: cache  # compiles nothing
    first = kept.turn(workload)
    assert kept.turn(workload) is first
    assert kept.turn(larger) is not first
    fresh = Transformers(MODEL, "StaticCache")
    fresh.turn(workload)
    assert fresh._static is None


def test_a_turn_that_does_not_fit_is_no_error():
    workload = Workload(8, 1, 1, "wall")
    assert not grid.decodes(Scripted("a", [], fails_at=1), workload)
    assert grid.decodes(Scripted("a", []), workload)


@pytest.mark.slow
def test_compiled_contenders_run():
    made = contenders.make_contenders(
        MODEL, [MethodSpec.parse("full:cache_implementation=static", None)], ["static"], compiled=True, process=None
    )
    assert [name for name in made if name.endswith("compiled")] == [
        "transformers StaticCache, compiled",
        "full:cache_implementation=static, compiled",
    ]
    for contender in made.values():
        assert len(contender.turn(Workload(32, 1, 3, "wall")).step_ms) == 3


# The command


def test_the_grid_is_complete_and_compared_with_full_and_dynamic(tmp_path, capsys):
    content = bench(
        tmp_path, "--methods", "snapkv", "adakv:window_size=4", "--ratios", "0.2", "0.5", "--batches", "1", "2"
    )
    assert [(cell["length"], cell["batch"]) for cell in content["cells"]] == [(32, 1), (32, 2)]
    names = ["transformers DynamicCache", "full"]
    names += ["snapkv@0.2", "snapkv@0.5", "adakv:window_size=4@0.2", "adakv:window_size=4@0.5"]
    for cell in content["cells"]:
        assert list(cell["ways"]) == names
        assert all(len(taken["turns"]) == 2 for taken in cell["ways"].values())
        assert all(len(turn["step_ms"]) == 2 for taken in cell["ways"].values() for turn in taken["turns"])
    rows = {row["way"]: row for row in report.rows_of(content)}
    assert rows["full"]["scoring_share"]["median"] > 0
    assert rows["full"]["speedup_dynamic"]["median"] > 0
    assert rows["snapkv@0.2"]["scoring_share"] is not None
    assert rows["transformers DynamicCache"]["speedup_dynamic"] is None
    assert rows["snapkv@0.2"]["kv_bytes"] < rows["snapkv@0.5"]["kv_bytes"] < rows["full"]["kv_bytes"]
    assert 0 < rows["full"]["bandwidth_fraction"] < 1
    assert content["environment"].keys() >= {"date", "device", "threads", "torch", "transformers"}
    assert content["weight_bytes"] == sum(weight.numel() * 4 for weight in MODEL.parameters())
    table = (tmp_path / "bench.md").read_text()
    assert capsys.readouterr().out.strip() == table.strip()
    assert table.count("| snapkv@0.2 |") == 2
    assert "kvpress" not in table  # it took no part
    assert "python -m kvcompress bench --shape tiny" in table
    report.plot(content, report.rows_of(content), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_the_plot_says_what_it_shows_and_of_one_length_no_growth(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **named: figures.append(figure))
    content = json.loads((ROOT / "benchmarks" / "results" / "bench_smollm2.json").read_text())
    rows = report.rows_of(content)
    for shown in (rows, [row for row in rows if row["length"] == rows[0]["length"]]):
        report.plot(content, shown, tmp_path / "bench.png")
    several, one = figures
    assert several.get_suptitle().endswith("\nmedians and quartiles; grey: linear growth")
    assert one.get_suptitle().endswith("\nmedians and quartiles")
    assert [sum(line.get_color() == "0.8" for line in figure.axes[0].lines) for figure in figures] == [1, 0]


def test_a_memory_limit_counts_the_largest_batch(tmp_path):
    content = bench(tmp_path, "--methods", "snapkv", "--memory-limit", "1")
    rows = {row["way"]: row for row in report.rows_of(content, 10**9)}
    per_row = rows["full"]["kv_bytes"]
    assert rows["full"]["largest_batch"] == (10**9 - content["weight_bytes"]) // per_row
    assert rows["snapkv@0.1"]["largest_batch"] > 3 * rows["full"]["largest_batch"]
    assert "within 1 GB" in (tmp_path / "bench.md").read_text()


@pytest.mark.parametrize(
    ("limit", "was_tried", "start"), [(None, True, "Largest batch: tried"), (2.0, True, "Largest batch: computed")]
)
def test_the_page_says_how_the_largest_batches_of_its_results_were_found(limit, was_tried, start):
    assert comparison.note(limit, was_tried).startswith(start)
    assert comparison.note(None, False) == "The largest batch was not asked for."


def test_a_resumed_run_measures_only_what_is_missing(tmp_path, monkeypatch):
    before = bench(tmp_path, "--methods", "knorm")
    measured, measure = [], grid.measure_cell

    def noted(taking_part, workload, *rest):
        measured.append(workload.length)
        return measure(taking_part, workload, *rest)

    monkeypatch.setattr(grid, "measure_cell", noted)
    after = bench(tmp_path, "--methods", "knorm", "--lengths", "32", "64", "--resume")
    assert measured == [64]
    assert after["cells"][0] == before["cells"][0]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"]


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b"\xff", b'{"environment": {}, "settings": {}, "cells": 3}'])
def test_a_damaged_file_is_not_resumed(tmp_path, capsys, damage):
    (tmp_path / "bench.json").write_bytes(damage)
    assert main(["bench", *QUICK, "--out", str(tmp_path / "bench"), "--resume"]) == 2
    assert "cannot be resumed" in capsys.readouterr().err.splitlines()[-1]


def test_output_that_cannot_be_written_is_found_before_a_model_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "load", None)  # a call would raise
    (tmp_path / "file").touch()
    (tmp_path / "a.json").mkdir()
    for out, what in (("file/x", "file"), ("a", "a.json")):
        assert main(["bench", *QUICK, "--out", str(tmp_path / out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"'{tmp_path / what}' cannot be written: " in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_with_one_line_and_no_process_left(tmp_path, fake_worker, monkeypatch, capsys, number):
    workers, original = [], KVPressProcess.__exit__
    monkeypatch.setattr(
        KVPressProcess, "__exit__", lambda self, *error: workers.append(self._process) or original(self, *error)
    )
    monkeypatch.setattr(comparison, "measure_grid", lambda *arguments: os.kill(os.getpid(), number))
    assert main(["bench", *QUICK, "--out", str(tmp_path / "b"), "--kvpress-python", sys.executable]) == 128 + number
    said = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert capsys.readouterr().err.splitlines() == [f"error: {said}"]
    assert [worker.returncode for worker in workers] == [-signal.SIGKILL]


def test_turns_are_timed_when_the_device_is_done():
    with synchronised_reads(standalone) as reads:
        Transformers(MODEL, "DynamicCache").turn(Workload(16, 1, 2, "wall"))
    assert {read.rpartition(":")[0] for read in reads} == {standalone.__name__}
    assert len(reads) == 2 + 1 + 2  # around the prompt, before the first step, after every step


def test_when_the_time_is_over_no_further_cell_is_begun(tmp_path, monkeypatch, capsys):
    content = bench(tmp_path, "--methods", "knorm", "--batches", "1", "2", "--minutes", "0.0001")
    assert [cell["batch"] for cell in content["cells"]] == [1]
    assert "32 tokens, batch 2: skipped, out of time" in capsys.readouterr().err


def test_where_no_cache_has_enough_memory_there_is_a_table_and_no_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grid, "attempt", lambda call: None)
    bench(tmp_path, "--methods", "knorm")
    assert "| full | out of memory |" in (tmp_path / "bench.md").read_text()
    assert "no plot: no cache had enough memory" in capsys.readouterr().err
    assert not (tmp_path / "bench.png").exists()


def test_without_time_for_a_first_cell_there_is_a_table_and_no_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "measure_grid", lambda *given: None)
    assert main(["bench", *QUICK, "--out", str(tmp_path / "bench"), "--methods", "knorm"]) == 0
    assert "memory was copied" not in (tmp_path / "bench.md").read_text()
    assert "no plot: nothing was measured in time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--shape", "qwen2-8b"],
            "there is no shape 'qwen2-8b' (did you mean 'qwen2-7b'?); valid: llama-3-8b",
        ),
        (["--shape", "tiny", "some/model"], "give either a model or --shape, not 'some/model' and 'tiny'"),
        ([], "error: give either a model or --shape\n"),
        (["--shape", "tiny", "--methods", "snapvk"], "there is no method 'snapvk' (did you mean 'snapkv'?); valid: "),
        (["--shape", "tiny", "--methods", "snapkv:windows=4"], "method 'snapkv' has no option 'windows'"),
        (["--shape", "tiny", "--methods", "snapkv:4"], "in 'snapkv:4', '4' is not NAME=VALUE"),
        (["--shape", "tiny", "--methods", "snapkv:ratio=0.3"], "'ratio=0.3' is not an option of a method"),
        (["--shape", "tiny", "--methods", "snapkv:window_size=4:window_size=8"], "window_size= is given twice"),
        (["--shape", "tiny", "--methods", "visionzip"], "method 'visionzip' drops vision tokens"),
        (["--shape", "tiny", "--methods", "snapkv:protect_text=a"], "protect_text= needs a tokenizer"),
        (["--shape", "tiny", "--ratios", "1.5"], "1.5"),
        (["--shape", "tiny", "--peers", "vllm"], "there is no peer 'vllm'; valid: dynamic, static"),
        (["--shape", "tiny", "--device", "cpu", "--largest-batch"], "--largest-batch tries until memory runs out"),
        (["throughput", "--shape", "tiny", "--answers", "9", "3"], "--answers 9 3: the least is more than the most"),
        (["throughput", "--shape", "tiny", "--methods", "snapk"], "no method 'snapk'"),
        (["throughput", "--shape", "tiny", "--methods", "snapkv:decode_ratio=0.5"], "or decode_ratio=, not both"),
        (["throughput", "--shape", "tiny", "--methods", "attention-matching"], "does not go with decode_budget="),
        (["throughput", "--shape", "tiny", "--methods", "full:cache_implementation=quantized"], "requests in flight"),
        (["throughput", "--shape", "tiny", "--paged", "adakv"], "does not go with continuous batching"),
        (["throughput", "--shape", "tiny", "--paged", "full"], "does not go with continuous batching"),
        (["throughput", "--shape", "tiny", "--peers", "vllm"], "invalid choice"),
        (["throughput", "--shape", "tiny", "--device", "cpu", "--kv-gb", "auto"], "a CPU give a number"),
        (["throughput", "--shape", "tiny", "--kv-gb", "0"], "--kv-gb"),
        (["throughput", "--shape", "tiny", "--requests", "0"], "--requests"),
        (["throughput", "--shape", "huge"], "no shape 'huge'"),
        (["launches", "--shape", "tony"], "'tiny'"),
        (["launches", "--shape", "tiny", "--methods", "q-filters"], "calibration"),
        (["launches"], "--shape"),
        (["launches", "a-model", "--layers", "2"], "--layers is for a --shape"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # which `launches` sets
    monkeypatch.setattr(throughput, "load", lambda *_: pytest.fail("a model was loaded"))
    assert main(["bench", *arguments, "--out", str(tmp_path / "bench")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("out", "file"),
    [
        ("bench", "bench.json"),
        ("a/snapkv-0.2", "a/snapkv-0.2.json"),
        ("bench.md", "bench.md"),
        ("v1.0.json", "v1.0.json"),
    ],
)
def test_output_has_the_name_that_was_given_also_with_a_point_in_it(out, file):
    for parse in (command.parser, command.throughput_parser, command.launches_parser):
        assert parse().parse_args(["--out", out]).out == Path(file)


def test_another_release_is_not_mixed_into_a_file(tmp_path, monkeypatch, capsys):
    bench(tmp_path)
    monkeypatch.setattr("kvcompress.bench.timing.__version__", "99")
    assert main(["bench", *QUICK, "--out", str(tmp_path / "bench"), "--resume"]) == 2
    assert "cannot be resumed: it was made with kvcompress=" in capsys.readouterr().err


def test_a_device_that_cannot_be_used_is_named(tmp_path, capsys):
    assert main(["bench", *QUICK, "--out", str(tmp_path / "bench"), "--device", "cuda:77"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "device 'cuda:77' cannot be used" in said


def test_a_device_whose_work_is_not_waited_for_is_refused():
    with pytest.raises(kvcompress.KVCompressError, match="device 'xpu' is not measured: allowed are cpu, cuda, mps"):
        check_measured(torch.device("xpu"))


def test_an_empty_argument_is_named(capsys):
    assert main(["bench", "tiny", ""]) == 2
    assert "an argument is empty" in capsys.readouterr().err


def test_other_settings_are_not_mixed_into_a_file(tmp_path, capsys):
    bench(tmp_path, "--methods", "knorm")
    assert main(["bench", *QUICK, "--out", str(tmp_path / "bench"), "--methods", "tova", "--resume"]) == 2
    assert "cannot be resumed: it was made with methods=['full', 'knorm@0.1']" in capsys.readouterr().err


def test_minutes_have_sixty_seconds(tmp_path, monkeypatch, capsys):
    def measure(*given) -> None:
        raise kvcompress.KVCompressError(f"{given[-1]} seconds")

    monkeypatch.setattr(comparison, "measure_grid", measure)
    assert main(["bench", *QUICK, "--out", str(tmp_path / "bench"), "--methods", "knorm", "--minutes", "2"]) == 2
    left = float(capsys.readouterr().err.split()[1])
    assert 100 < left <= 120


def test_a_call_is_timed_from_an_idle_device_to_an_idle_device(monkeypatch):
    log = []
    monkeypatch.setattr(timing, "synchronise", lambda device: log.append("idle"))
    monkeypatch.setattr(timing, "CLOCKS", {"wall": lambda: log.append("clock") or len(log)})
    times = timing.interleaved({"one": lambda: log.append("call")}, 3, torch.device("cpu"))
    assert log == ["idle", "clock", "call", "idle", "clock"] * 5
    assert times["one"] == {"median": 3000, "q1": 3000, "q3": 3000, "repeats": 3}


def test_what_an_earlier_turn_left_does_not_count_against_a_batch(monkeypatch):
    log = []
    monkeypatch.setattr(grid, "release_memory", lambda: log.append("freed"))
    monkeypatch.setattr(grid, "attempt", lambda *given: log.append("attempt"))
    assert not grid.decodes(Scripted("a", []), None)
    assert log == ["freed", "attempt"]


def test_shapes_are_models_or_paths():
    assert source("some/model", None) == {"pretrained": "some/model"}
    assert source(None, "tiny")["config"]["num_key_value_heads"] == 2


def test_a_shape_has_whole_heads_of_a_usual_width():
    for name, shape in SHAPES.items():
        width, rest = divmod(shape["hidden_size"], shape["num_attention_heads"])
        assert (rest, shape["num_attention_heads"] % shape["num_key_value_heads"]) == (0, 0), name
        assert width in (16, 64, 128), name
        assert isinstance(shape["tie_word_embeddings"], bool), name
        assert shape["vocab_size"] % 64 == 0, name


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("qwen2-0.5b", 494_032_768),
        ("qwen2-7b", 7_615_616_512),
        ("llava-onevision-7b-lm", 7_615_616_512 + 2 * 3584 * (152_128 - 152_064)),  # Qwen2-7B with a larger vocabulary
        ("smollm2-135m", 134_515_008),
    ],
)
def test_a_shape_has_as_many_parameters_as_the_model_of_its_name(shape, parameters):
    config = dict(SHAPES[shape])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    assert sum(weight.numel() for weight in model.parameters()) == parameters


# kvpress in its own process

FAKE_WORKER = """
import json, sys

def reply(message):
    print(json.dumps(message), flush=True)

hello = json.loads(sys.stdin.readline())
presses = {"full": {}, "snapkv": {"window_size": 64}, "adakv": {"variant": "kvpress", "window_size": 64}}
reply({"presses": presses, "versions": {"kvpress": "9", "transformers": "8", "torch": "7"}})
for line in sys.stdin:
    order = json.loads(line)
    if order["batch"] > 4:
        reply({"error": "out of memory"})
    elif order["length"] == 13:
        sys.exit(3)
    else:
        steps = [1000.0 * (order["ratio"] or 1)] * order["steps"]
        reply({"prompt_ms": hello["threads"], "step_ms": steps, "kv_bytes": 77, "peak_bytes": None})
"""


@pytest.fixture
def fake_worker(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_WORKER)
    monkeypatch.setattr(KVPressProcess, "WORKER", worker)


def test_kvpress_takes_its_turns_beside_each_method_that_it_has(tmp_path, fake_worker):
    methods = ["snapkv", "look-m", "adakv:window_size=4", "adakv:variant=kvpress"]
    content = bench(tmp_path, "--methods", *methods, "--kvpress-python", sys.executable, "--threads", "1")
    assert [name for name in content["cells"][0]["ways"] if name.startswith("kvpress")] == [
        "kvpress full",
        "kvpress snapkv@0.1",
        "kvpress adakv:variant=kvpress@0.1",
    ]
    assert content["environment"]["kvpress"] == "9 (transformers 8, torch 7)"
    turn = content["cells"][0]["ways"]["kvpress snapkv@0.1"]["turns"][0]
    assert turn == {"prompt_ms": 1, "step_ms": [100, 100], "kv_bytes": 77, "peak_bytes": None, "scoring_ms": None}
    rows = {row["way"]: row for row in report.rows_of(content)}
    ours = content["cells"][0]["ways"]["snapkv@0.1"]["turns"]
    ratios = [100 / statistics.mean(turn["step_ms"]) for turn in ours]
    assert rows["snapkv@0.1"]["speedup_kvpress"]["median"] == pytest.approx(statistics.median(ratios))
    assert rows["kvpress snapkv@0.1"]["scoring_share"] is None
    pair = [rows[name]["speedup_kvpress"]["median"] for name in ("snapkv@0.1", "adakv:variant=kvpress@0.1")]
    mean = statistics.geometric_mean(pair)  # `full` presses nothing
    assert f"Decoding against kvpress, geometric mean: {mean:.2f}x" in (tmp_path / "bench.md").read_text()


def test_kvpress_out_of_memory_is_a_cell_of_the_table(tmp_path, fake_worker):
    content = bench(tmp_path, "--methods", "snapkv", "--kvpress-python", sys.executable, "--batches", "5")
    assert content["cells"][0]["ways"]["kvpress snapkv@0.1"] == {"error": "out of memory"}
    assert "| kvpress snapkv@0.1 | out of memory |" in (tmp_path / "bench.md").read_text()


def test_a_kvpress_process_that_ends_is_an_error(fake_worker):
    with KVPressProcess(sys.executable, {}, "float32", "cpu", 1) as process:
        contender = KVPress(process, MethodSpec.parse("snapkv", 0.1))
        with pytest.raises(kvcompress.KVCompressError, match="ended with status 3"):
            contender.turn(Workload(13, 1, 1, "wall"))
    with pytest.raises(kvcompress.KVCompressError, match="'/no/python' cannot be run: No such file"):
        KVPressProcess("/no/python", {}, "float32", "cpu", 1)


@pytest.fixture
def worker(monkeypatch) -> Iterator[tuple[types.ModuleType, list[str]]]:
    """The script itself, with a stand-in for kvpress whose presses drop nothing; what it does, step by step."""
    log = []

    class Press:
        def __init__(self, removed):
            self.removed = removed

        @contextmanager
        def __call__(self, model):
            log.append(model.config._attn_implementation)
            yield
            log.append("off")

    fake = types.ModuleType("kvpress")
    presses = ["ExpectedAttention", "ObservedAttention", "KeyDiff", "Knorm", "LagKV", "PyramidKV", "Random", "SnapKV"]
    for name in [*presses, "StreamingLLM", "TOVA"]:
        setattr(fake, f"{name}Press", type(name, (Press,), {}))
    monkeypatch.setitem(sys.modules, "kvpress", fake)
    monkeypatch.setitem(sys.modules, "standalone", standalone)
    worker = importlib.import_module("kvcompress.bench.kvpress_worker")
    monkeypatch.setattr(worker, "read_prompt", lambda *given: log.append("prompt") or standalone.read_prompt(*given))
    monkeypatch.setattr(worker, "decode", lambda *given: log.append("decode") or standalone.decode(*given))
    yield worker, log
    sys.modules.pop("kvcompress.bench.kvpress_worker")


def test_the_worker_replies_line_by_line_and_to_nothing_else(worker, monkeypatch, capfd):
    worker, _ = worker
    monkeypatch.setattr(worker, "version", {"kvpress": "9", "transformers": "8", "torch": "7"}.get)
    monkeypatch.setattr(worker, "load", lambda *given: os.write(1, b"a library talks\n") and MODEL)
    order = {
        "method": "snapkv",
        "ratio": 0.5,
        "batch": 3,
        "length": 20,
        "steps": 2,
        "clock": "wall",
        "one_prompt": True,
    }
    hello = {"source": {}, "dtype": "float32", "device": "cpu", "threads": torch.get_num_threads()}
    fits = worker.turn

    def turn(model, order):
        if order["batch"] > 4:
            raise torch.OutOfMemoryError("out of memory")
        return fits(model, order)

    monkeypatch.setattr(worker, "turn", turn)
    asked = [hello, order, {**order, "batch": 5}, order]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(each) + "\n" for each in asked)))
    before = os.dup(1)
    try:
        worker.main()
    finally:
        os.dup2(before, 1)
    replies = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert replies[0]["versions"] == {"kvpress": "9", "transformers": "8", "torch": "7"}
    named = "expected-attention full h2o keydiff knorm lagkv pyramidkv random snapkv streamingllm tova"
    presses = replies[0]["presses"]
    assert set(named.split()) <= {*presses, "full"} <= {*kvcompress.list_methods(), "full"}
    for method, options in presses.items():
        make_policy(method, None if method == "full" else 0.5, **options)
    for method in ("adakv", "lagkv", "pyramidkv", "snapkv"):
        assert MethodSpec.parse(f"{method}:preset=kvpress", 0.5).options == presses[method]
    assert replies[2] == {"error": "out of memory"}
    for reply in (replies[1], replies[3]):
        assert len(reply["step_ms"]) == 2
        assert reply["kv_bytes"] == 3 * 22 * 2 * 2 * 2 * 16 * 4, "three rows of one prompt"


def test_the_worker_presses_the_prompt_only_and_cleans_up(worker):
    worker, log = worker
    MODEL.model.layers[0].self_attn.masked_key_indices = "of the press before"
    order = {"method": "h2o", "ratio": 0.5, "batch": 2, "length": 20, "steps": 3, "clock": "wall"}
    order["one_prompt"] = False
    base = MODEL.config._attn_implementation
    reply = worker.turn(MODEL, order)
    assert log == ["eager", "prompt", "off", "decode"]
    assert MODEL.config._attn_implementation == base
    assert MODEL.model.layers[0].self_attn.masked_key_indices is None
    assert Turn(**reply).kv_bytes == 2 * 23 * 2 * 2 * 2 * 16 * 4
    assert len(reply["step_ms"]) == 3
    log.clear()
    worker.turn(MODEL, {**order, "method": "full", "ratio": None})
    assert log == ["prompt", "decode"]
    # What kvpress hides in one row it hides in every row that is made of it.
    rows, heads, columns = torch.zeros(2, dtype=int), torch.tensor([0, 1]), torch.tensor([4, 7])
    MODEL.model.layers[0].self_attn.masked_key_indices = (rows, heads, columns)
    worker.repeat(MODEL, DynamicCache(config=MODEL.config), 2)
    rows, heads, columns = MODEL.model.layers[0].self_attn.masked_key_indices
    assert list(zip(rows.tolist(), heads.tolist(), columns.tolist(), strict=True)) == [
        (0, 0, 4),
        (0, 1, 7),
        (1, 0, 4),
        (1, 1, 7),
    ]
