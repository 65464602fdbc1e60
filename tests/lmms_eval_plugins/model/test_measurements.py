"""Measurement rows: their summary and their file."""

import json

import pytest

from lmms_eval_plugins.model.measurements import summarise, write_rows


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
    json.dumps(summary)
