"""Measurement rows: their summary and their file."""

import json

import pytest

from lmms_eval_plugins.model.measurements import summarise, throughput, write_rows


def test_a_failed_write_leaves_the_old_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows([{"a": 1}], path)
    with pytest.raises(TypeError):
        write_rows([{"a": object()}], path)
    assert path.read_text() == '{"a": 1}\n'
    assert list(tmp_path.iterdir()) == [path]


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
