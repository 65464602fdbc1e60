"""Measurement rows: their summary and their file."""

import json
from types import SimpleNamespace

import pytest

from lmms_eval_plugins.model.measurements import row_of, summarise, throughput, write_rows


def test_a_failed_write_leaves_the_old_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows([{"a": 1}], path)
    with pytest.raises(TypeError):
        write_rows([{"a": object()}], path)
    assert path.read_text() == '{"a": 1}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_row_of_a_batch_has_its_own_counts_and_its_share_of_the_bytes():
    """Two rows of three beams each, on a model of one layer."""
    measured = SimpleNamespace(
        ttft_s=0.5, tpot_s=0.1, tokens_in=[7, 8], tokens_out=[2, 3], vision_tokens=[0, 4], kv_bytes_prompt=100,
        kv_bytes_end=120, kv_room_bytes=30, peak_memory_bytes=999, realised_ratios=[[0.1, 0.1, 0.1, 0.2, 0.2, 0.2]],
    )  # fmt: skip
    tower, prompt = SimpleNamespace(seconds=0.25, is_known=True), SimpleNamespace(is_known=False, prompt_pass=None)
    answers = SimpleNamespace(
        measured=measured,
        tower=tower,
        prompt=prompt,
        texts=["a", "b"],
        kept={},
        seconds=3.0,
        in_slots=None,
        reused_tokens=None,
    )
    request = SimpleNamespace(args=("?", None, {}, 5, "task", "test"))
    row = row_of(request, answers, 1, (2, 1))
    expected = {
        "task": "task", "doc_id": 5, "split": "test", "batch_size": 2, "ttft_s": 0.5, "vision_s": 0.25,
        "vision_is_known": True, "prompt_is_known": False, "tpot_s": 0.1, "tokens_in": 8, "tokens_out": 3,
        "vision_tokens": 4, "kv_bytes_prompt": 50, "kv_bytes_end": 60, "kv_room_bytes": 15, "realised_ratio": [0.2],
        "images": 2, "videos": 1, "share_s": 1.5, "slots": None, "waited_s": None, "peak_kv_bytes": 120,
        "peak_memory_bytes": 999, "reused_tokens": None,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    answers.reused_tokens = 0  # of a prefix cache that knew nothing of it
    assert row_of(request, answers, 1, (2, 1)) == {**row, "reused_tokens": 0}
    answers.reused_tokens = 11
    unknown = dict.fromkeys(("ttft_s", "peak_memory_bytes"))
    assert row_of(request, answers, 1, (2, 1)) == {**row, "reused_tokens": 5, **unknown}
    answers.in_slots = SimpleNamespace(slots=4, waited_s=0.5, peak_kv_bytes=120, peak_memory_bytes=None, halved=False)
    assert row_of(request, answers, 1, (2, 1))["tpot_s"] is None


def test_summary_gives_the_spread_of_each_quantity():
    row = dict.fromkeys(
        ("tokens_in", "tokens_out", "vision_tokens", "kv_bytes_prompt", "kv_bytes_end", "peak_memory_bytes"), 4
    )
    row |= {"rank": 0, "share_s": 1.0, "peak_kv_bytes": 4}
    rows = [
        {**row, "ttft_s": float(i), "tpot_s": None if i else 0.5, "realised_ratio": [0.1 * i, 0.3]} for i in range(11)
    ]
    summary = summarise(rows)
    assert summary["samples"] == 11
    assert summary["ttft_s"] == pytest.approx({"mean": 5, "median": 5, "p10": 1, "p90": 9})
    assert summary["tpot_s"]["median"] == 0.5  # answers of one token have none
    assert summary["realised_ratio"]["per_layer"] == pytest.approx([0.5, 0.3])
    assert summary["realised_ratio"]["mean"] == pytest.approx(0.4)
    assert summary["realised_ratio"]["max"] == pytest.approx(0.65)
    assert summarise([]) == {"samples": 0}
    assert "reused_share" not in summary
    rows[0]["reused_tokens"], rows[1]["reused_tokens"] = 0, 4
    assert summarise(rows)["reused_share"] == pytest.approx(1 / 11)
    json.dumps(summary)


def test_the_rate_of_a_run_is_over_the_slowest_ranks_seconds_and_its_peak_that_of_one():
    rows = [
        {"rank": rank, "share_s": seconds, "tokens_out": 3, "peak_kv_bytes": size}
        for rank, seconds, size in [(0, 1.0, 10), (0, 0.5, 40), (1, 2.0, 30), (1, 1.0, 20)]
    ]
    assert throughput(rows) == pytest.approx({"answers_per_s": 4 / 3, "tokens_per_s": 4.0, "peak_kv_bytes": 40})
    assert throughput([]) == {}
    rows[0]["reused_tokens"] = 1  # some of the prefills were spared: such a rate depends on what was asked before
    assert throughput(rows) == {"peak_kv_bytes": 40}
