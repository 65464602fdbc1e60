"""The arithmetic of the throughput benchmark, and that it runs."""

import pytest

from benchmarks.eval_throughput import compare, report, speed

RECORDS = [
    {"cell": "full-1", "questions": 10, "seconds": {"grid": 2.0, "loop": 4.0}, "same answers": 10},
    {"cell": "knorm-0.2", "questions": 10, "seconds": {"grid": 0.5, "loop": 3.5}, "same answers": 9},
    {"cell": "knorm-0.1", "questions": 10, "seconds": {"grid": 0.5, "loop": 1.5}, "same answers": 10},
]


def test_speed_is_all_questions_over_all_seconds():
    assert speed(RECORDS, "grid") == 10.0
    assert speed(RECORDS, "loop") == pytest.approx(10 / 3)


def test_report_gives_the_ratio_of_each_cell_of_all_and_their_median():
    text = report(RECORDS, "measured so", "wall")
    assert "| full-1 | 5 | 2.5 | 2.00 | 10/10 |" in text
    assert "| knorm-0.2 | 20 | 2.86 | 7.00 | 9/10 |" in text
    assert "| all | 10 | 3.33 | **3.00** | 29/30 |" in text
    assert "Median ratio of the cells 3.00." in text
    assert "measured so" in text


@pytest.mark.slow
def test_both_ways_answer_every_question(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    records, measured = compare(["tiny_textvqa", "tiny", "snapkv", "0.2", "window_size=8"], 2, "wall")
    assert [record["cell"] for record in records] == ["snapkv-0.2-window_size=8"]
    assert records[0]["same answers"] == records[0]["questions"] == 2
    assert all(seconds > 0 for seconds in records[0]["seconds"].values())
    assert measured.startswith("measuring tiny_textvqa with tiny")
