"""The page of a speech run plays its answers, those of every cache side by side."""

import json
import re

import numpy as np
import pytest
import torch

from kvcompress.__main__ import main
from kvcompress.speech import SAMPLING_RATE
from kvcompress.speech.prompts import growing_wav
from lmms_eval_plugins.report.html.page import TEMPLATES
from lmms_eval_plugins.report.html.speech import BINS, MOST_PROMPTS
from tests.support.browser import opened

ASKED = ["Why is the sky blue? </script><script>alert(1)</script>", "What do you hear?"]
LABELS = {
    "compressed-overlap": "snapkv:window_size=4@0.3, overlapped",
    "dynamic": "transformers DynamicCache",
}
SECONDS = {"dynamic": 2.0, "compressed-overlap": 1.5}


def sound(seconds: float, hertz: float) -> torch.Tensor:
    time = torch.arange(round(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    return 0.4 * torch.sin(2 * np.pi * hertz * time) * torch.sin(np.pi * time / seconds) ** 2


def row(strategy: str, place: int) -> dict:
    is_full = strategy == "dynamic"
    return {
        "strategy": strategy, "prompt": place, "wav": f"heard/{strategy}-{place}.wav",
        "text": f"<b>Because</b> of {strategy}.", "text_tokens": 9, "codes": 100, "prompt_tokens": 60,
        "first_text_s": 0.1, "text_s": 0.6, "first_code_s": 0.7 if is_full else 0.2,
        "first_audio_s": 1.2 if is_full else 0.6, "waveform_s": 2.4, "total_s": 2.5, "audio_s": SECONDS[strategy],
        "real_time_factor": 1.2, "underruns": 0, "kv_bytes": 120_000 if is_full else 40_000,
        "talker_kv_bytes": 90_000, "realised_ratio": None if is_full else 0.3, "peak_memory_bytes": 10**9,
    }  # fmt: skip


@pytest.fixture
def results(tmp_path):
    """The .json of a run with two caches, its second and last round with sound."""
    for strategy, seconds in SECONDS.items():
        for place in range(len(ASKED)):
            with growing_wav(tmp_path / "heard" / f"{strategy}-{place}.wav") as write:
                write(sound(seconds, 220 * (place + 1)))
    answers = [row(strategy, place) for place in range(len(ASKED)) for strategy in LABELS]
    content = {
        "command": "python -m kvcompress speech org/model snapkv:window_size=4 0.3",
        "settings": {
            "labels": LABELS, "strategies": list(LABELS), "window": [4, 4, 2], "one_piece": False, "without": [],
            "talker": None,
        },
        "environment": {"date": "2026-11-23", "device": "a CPU"},
        "prompts": [
            {"text": text, "image": place == 1, "audio_s": 3.0 if place else None} for place, text in enumerate(ASKED)
        ],
        "cold": [{"strategy": "dynamic", "prompt": 0, "answer": row("dynamic", 0)}],
        "warm": [{"repeat": repeat, "answers": answers} for repeat in (1, 2)],
    }  # fmt: skip
    file = tmp_path / "speech.json"
    file.write_text(json.dumps(content))
    return file


def written(results) -> tuple[str, dict]:
    assert main(["report", str(results)]) == 0
    page = results.with_suffix(".html").read_text()
    return page, json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


def test_the_page_holds_every_answer_with_its_sound(results, capsys):
    page, data = written(results)
    assert "written: " in capsys.readouterr().out
    assert page.count("</script>") == 2, "a prompt must not end the data"
    assert [prompt["text"] for prompt in data["prompts"]] == ASKED
    for prompt in data["prompts"]:
        full, compressed = prompt["answers"]
        assert full["label"] == "transformers DynamicCache", "the full cache comes first"
        assert compressed["label"] == LABELS["compressed-overlap"]
        for answer in (full, compressed):
            assert answer["audio"].startswith("data:audio/wav;base64,UklGR")
            assert len(answer["low"]) == len(answer["high"]) == BINS
            assert max(answer["high"]) == pytest.approx(0.4, abs=0.01) == -min(answer["low"])
    assert [(line["start"], line["label"]) for line in data["rows"]] == [
        *(("warm", label) for label in LABELS.values()),
        ("cold", LABELS["dynamic"]),
    ]


def test_the_page_holds_what_its_script_reads(results):
    _, data = written(results)
    script = (TEMPLATES / "speech.js").read_text()
    answer = data["prompts"][0]["answers"][0]
    for name, part in {"DATA": data, "row": data["rows"][0], "prompt": data["prompts"][0], "answer": answer}.items():
        assert set(re.findall(rf"\b{name}\.([a-z]\w*)", script)) <= set(part), name


def test_answers_without_sound_and_without_memory_are_shown(results, capsys):
    content = json.loads(results.read_text())
    (results.parent / "heard" / "dynamic-0.wav").write_bytes(b"RIFF")
    answers = content["warm"][-1]["answers"]
    del answers[0]["wav"]
    answers[2] = {"strategy": "compressed-overlap", "prompt": 1, "error": "out of memory"}
    results.write_text(json.dumps(content))
    _, data = written(results)
    first, second = data["prompts"]
    assert [answer["audio"] for answer in first["answers"]] == [None, None]
    assert [answer["error"] for answer in second["answers"]] == [None, "out of memory"]
    assert "dynamic-0.wav" in capsys.readouterr().err


def test_a_page_of_many_prompts_says_how_many_there_are(results):
    content = json.loads(results.read_text())
    content["prompts"] *= MOST_PROMPTS
    results.write_text(json.dumps(content))
    _, data = written(results)
    assert (len(data["prompts"]), data["all_prompts"]) == (MOST_PROMPTS, len(ASKED) * MOST_PROMPTS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not the result of a speech run (JSONDecodeError"),
        ("[]", "is not the result of a speech run (TypeError"),
        ('{"warm": [{}]}', "is not the result of a speech run (KeyError: 'settings')"),
        ('{"warm": []}', "has no finished warm round: continue it with --resume"),
        ("[" * 100_000, "is not the result of a speech run (ValueError: it is nested too deeply)"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path, monkeypatch, capsys, content, message):
    (tmp_path / "speech.json").write_text(content)
    assert main(["report", str(tmp_path / "speech.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


# -- in a browser


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_plays_in_a_browser(browser, results, width):
    written(results)
    page, said, asked = opened(browser, results.with_suffix(".html"), viewport={"width": width, "height": 900})
    page.wait_for_function("[...document.querySelectorAll('audio')].every((audio) => audio.readyState >= 1)")

    lengths = page.evaluate("[...document.querySelectorAll('audio')].map((audio) => audio.duration)")
    assert lengths == pytest.approx([2.0, 1.5, 2.0, 1.5], abs=0.01)
    heights = page.evaluate("[...document.querySelectorAll('.wave .sound')].map((path) => path.getBBox().height)")
    assert len(heights) == 4
    assert min(heights) > 60, "the waveforms fill their room"
    starts = page.evaluate(
        "[...document.querySelectorAll('.wave .byte')].map((line) => Number(line.getAttribute('x1')))"
    )
    sounds = page.evaluate("[...document.querySelectorAll('.wave .sound')].map((path) => path.getBBox().x)")
    assert sounds == pytest.approx(starts, abs=0.5), "the sound begins at the mark"
    assert starts[1] < starts[0], "the compressed one is heard sooner"
    assert page.locator(".byte-name").all_text_contents() == ["first byte 1.2 s", "first byte 0.6 s"] * 2

    # Playing one ends the other; the line in the waveform moves.
    page.evaluate("document.querySelectorAll('audio').forEach((audio) => { audio.muted = true; })")
    for place in (0, 1):
        page.evaluate("(place) => document.querySelectorAll('audio')[place].play()", place)
    page.wait_for_function("document.querySelectorAll('audio')[1].currentTime > 0")
    assert page.evaluate("document.querySelectorAll('audio')[0].paused")
    page.locator(".wave").nth(3).click(
        position={"x": 0.9 * page.locator(".wave").nth(3).bounding_box()["width"], "y": 50}
    )
    page.wait_for_function("document.querySelectorAll('audio')[3].currentTime > 0")
    page.wait_for_function("document.querySelectorAll('.wave .now')[3].getAttribute('visibility') === 'visible'")

    assert page.inner_text(".prompt >> nth=0").startswith(ASKED[0])
    assert page.locator("#prompts b").count() == 0, "answers are text"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert said == []
    page.close()
