"""`python -m kvcompress speech`: its prompts, its turns, its table, and what it refuses."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CompileConfig

from kvcompress import KVCompressError
from kvcompress.__main__ import main
from kvcompress.command_line import interruptible
from kvcompress.speech import answering, strategies
from kvcompress.speech import run as speech_run
from kvcompress.speech.command import parser
from kvcompress.speech.prompts import bundled_prompts, growing_wav, read_prompts
from tests.support.omni import CODE_S, UNHEARD

ROOT = Path(__file__).parents[3]


@pytest.fixture
def eager_compile(monkeypatch):
    """The compiled path without a compiler, which would take half a minute."""

    def config(device: torch.device) -> CompileConfig:
        config = CompileConfig(fullgraph=True, backend="eager")
        config._compile_all_devices = True
        return config

    monkeypatch.setattr(strategies, "compile_config", config)


@pytest.fixture
def run(omni_checkpoint, omni, tmp_path, monkeypatch):
    """The command on one prompt, whose cold starts are in this process; returns the JSON. A whole model is omni once
    for all tests."""
    load = answering.load
    monkeypatch.setattr(answering, "load", lambda *given: load(*given) if given[-1] else omni)
    monkeypatch.setattr(speech_run, "in_a_fresh_process", lambda function, *arguments: function(*arguments))
    (tmp_path / "prompts.jsonl").write_text('{"text": "Hello, who are you?"}\n')

    def call(*flags: str, method: str = "snapkv:window_size=4", ratio: str = "0.3") -> dict:
        given = [omni_checkpoint, method, ratio, *quick(tmp_path), *flags]
        assert main(["speech", *given]) == 0
        return json.loads((tmp_path / "speech.json").read_text())

    return call


def quick(folder) -> list[str]:
    return [
        *("--device", "cpu", "--dtype", "float32", "--threads", "1", "--cold", "0", "--repeats", "1", "--exact"),
        *("--text-tokens", "4", "--codec-tokens", "5", "--out", str(folder / "speech")),
        *("--prompts", str(folder / "prompts.jsonl")),
    ]


# The command


@pytest.mark.slow  # compiles
@pytest.mark.skipif(UNHEARD > 0, reason="transformers 5.14's own Qwen2.5-Omni fails with a static cache")
def test_strategies_stand_side_by_side(run, eager_compile, capsys):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    content = run()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the static ones are really compiled
    rows = {row["strategy"]: row for row in content["warm"][0]["answers"]}
    assert list(rows) == ["static", "compressed", "compressed-static", "dynamic"]  # who begins changes
    for row in rows.values():
        assert row["text_tokens"] == 4
        assert row["codes"] == 5
        assert row["audio_s"] == pytest.approx((5 - UNHEARD) * CODE_S)
        assert row["real_time_factor"] == pytest.approx(row["total_s"] / row["audio_s"])
        assert row["first_audio_s"] <= row["waveform_s"] <= row["total_s"]
    assert rows["dynamic"]["text"] == rows["static"]["text"]
    assert rows["compressed"]["text"] == rows["compressed-static"]["text"]
    assert rows["compressed"]["kv_bytes"] < 0.5 * rows["dynamic"]["kv_bytes"]
    assert rows["dynamic"]["kv_bytes"] < rows["static"]["kv_bytes"], "only fixed shapes have room for what never comes"
    assert rows["compressed-static"]["realised_ratio"] == pytest.approx(0.3, abs=0.01)
    assert rows["dynamic"]["realised_ratio"] is None
    assert "| warm | snapkv:window_size=4:cache_implementation=static@0.3, compiled | 1 |" in capsys.readouterr().out


def test_compress_talker_makes_its_cache_smaller(run):
    (whole,) = run("--strategies", "compressed")["warm"][0]["answers"]
    (less,) = run("--strategies", "compressed", "--compress-talker")["warm"][0]["answers"]
    assert less["talker_kv_bytes"] < 0.6 * whole["talker_kv_bytes"]
    assert less["kv_bytes"] == whole["kv_bytes"]


def test_overlapped_answers_stand_beside_the_others_and_say_the_same(run, capsys):
    content = run("--strategies", "dynamic", "dynamic-overlap", "compressed-overlap", "--text-tokens", "12")
    rows = {row["strategy"]: row for row in content["warm"][0]["answers"]}
    assert rows["dynamic-overlap"]["text"] == rows["dynamic"]["text"]
    assert rows["dynamic"]["first_code_s"] > rows["dynamic"]["text_s"]
    assert rows["compressed-overlap"]["realised_ratio"] == pytest.approx(0.3, abs=0.01)
    out = capsys.readouterr().out
    assert "| warm | snapkv:window_size=4@0.3, overlapped | 1 |" in out
    assert f"| {rows['dynamic']['kv_bytes'] / 1e6:.3g} |" in out
    assert "In overlapped rows, the talker started with the second text token, otherwise after the last." in out
    run("--strategies", "dynamic")
    assert "The talker started after the last text token." in capsys.readouterr().out


@pytest.mark.slow
def test_decode_budgets_bound_both_caches(run, capsys):
    lengths = ("--strategies", "compressed", "--text-tokens", "60", "--codec-tokens", "60")
    (whole,) = run(*lengths)["warm"][0]["answers"]
    (less,) = run(*lengths, "--decode-budget", "10", "--talker-decode-budget", "12")["warm"][0]["answers"]
    assert less["kv_bytes"] < 0.6 * whole["kv_bytes"]
    assert less["talker_kv_bytes"] < 0.3 * whole["talker_kv_bytes"]
    out = capsys.readouterr().out
    assert "| warm | snapkv:window_size=4:decode_budget=10@0.3 | 1 |" in out
    assert "so is the talker's: snapkv:window_size=4:decode_budget=12@0.3." in out


@pytest.mark.parametrize("flags", [[], ["--save-audio", "FOLDER"]])
def test_a_page_plays_what_was_measured(run, tmp_path, flags):
    flags = [flag.replace("FOLDER", str(tmp_path / "heard")) for flag in flags]
    content = run("--strategies", "dynamic", "compressed", "--html", *flags)
    assert content["prompts"] == [{"text": "Hello, who are you?", "image": False, "audio_s": None}]
    for row in content["warm"][0]["answers"]:
        with wave.open(str(tmp_path / row["wav"])) as sound:
            assert sound.getnframes() / sound.getframerate() == row["audio_s"]
            assert np.abs(np.frombuffer(sound.readframes(sound.getnframes()), np.int16)).max() > 1000
    assert (tmp_path / "heard" / "dynamic-0.wav").exists() == bool(flags)
    assert (tmp_path / "speech.html").read_text().count("data:audio/wav;base64,") == 2


def test_sound_that_is_asked_for_later_is_made_from_the_last_round_alone(run, tmp_path):
    first = run("--strategies", "dynamic", "--repeats", "2")
    second = run("--strategies", "dynamic", "--repeats", "2", "--resume", "--html")
    assert second["warm"][0] == first["warm"][0]
    (row,) = second["warm"][1]["answers"]
    assert (tmp_path / row["wav"]).exists()
    assert run("--strategies", "dynamic", "--repeats", "2", "--resume", "--html")["warm"] == second["warm"]


def test_other_prompts_under_the_same_name_are_not_mixed_into_a_file(run, tmp_path, omni_checkpoint, capsys):
    run("--strategies", "dynamic")
    (tmp_path / "prompts.jsonl").write_text('{"text": "Goodbye"}\n')
    given = [omni_checkpoint, "snapkv:window_size=4", "0.3", *quick(tmp_path), "--strategies", "dynamic", "--resume"]
    assert main(["speech", *given]) == 2
    assert "cannot be resumed: it was made with prompts=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--compress-talker"], {}),
        (["--talker-decode-budget", "12"], {"decode_budget": 12}),
    ],
)
def test_the_thinkers_decode_budget_is_not_the_talkers(flags, options):
    given = parser().parse_args(["tiny", "snapkv", "0.3", "--decode-budget", "10", *flags])
    assert strategies.talker_method(given).options == options


def test_without_speech_the_table_has_no_empty_columns(run, capsys):
    content = run("--strategies", "compressed", "--without", "vision", "audio", "speech")
    assert content["weight_bytes"]["talker"] == content["weight_bytes"]["vision"] == 0
    out = capsys.readouterr().out
    assert "first text s" in out
    assert "real-time factor" not in out
    assert "talker" not in out.split("Weights")[1].split("|")[0]


def test_a_cold_start_is_the_first_answer_after_loading(run, monkeypatch, capsys):
    loads, disabled, load, answer = [], [], speech_run.load, answering.answer

    def answers(*given):
        disabled.append(speech_run.inductor_config.force_disable_caches)
        return answer(*given)

    monkeypatch.setattr(speech_run, "load", lambda given: loads.append(len(disabled)) or load(given))
    monkeypatch.setattr(answering, "answer", answers)
    content = run("--strategies", "dynamic", "compressed", "--cold", "2")
    assert [(taken["strategy"], taken["prompt"]) for taken in content["cold"]] == [
        *(("dynamic", 0), ("compressed", 0), ("dynamic", 1), ("compressed", 1))
    ]
    assert loads == [0, 1, 2, 3, 4]  # each cold start loads again, and answers once
    assert disabled == [True] * 4 + [False] * 4
    assert "| cold | snapkv:window_size=4@0.3 | 2 |" in capsys.readouterr().out


def test_a_run_goes_on_where_it_stopped(run, monkeypatch):
    first = run("--strategies", "dynamic", "--cold", "1")
    asked = []
    monkeypatch.setattr(
        speech_run, "in_a_fresh_process", lambda function, given, *at: asked.append(at) or {"error": "x"}
    )
    second = run("--strategies", "dynamic", "--cold", "2", "--repeats", "2", "--resume")
    assert asked == [("dynamic", 1)]
    assert second["cold"][0] == first["cold"][0]
    assert second["warm"][0] == first["warm"][0]
    assert [taken["repeat"] for taken in second["warm"]] == [1, 2]


def test_memory_that_runs_out_is_written_down(run, monkeypatch, capsys):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(answering, "answer", fails)
    content = run("--strategies", "dynamic")
    assert content["warm"][0]["answers"] == [{"strategy": "dynamic", "prompt": 0, "error": "out of memory"}]
    assert "transformers DynamicCache (out of memory) | 0 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "snapkw"}, "did you mean 'snapkv'"),
        ({"ratio": "1.5"}, "1.5"),
        ({"method": "fastv"}, "talker reads all of them"),
        ({"method": "snapkv:first_token=compressed"}, "first_token"),
        ({"method": "snapkv:prefill_chunk=8"}, "hidden states of all chunks"),
        ({"flags": ["--strategies", "statik"]}, "--strategies: invalid choice: 'statik' (choose from"),
        ({"flags": ["--without", "ears"]}, "--without: invalid choice: 'ears' (choose from"),
        ({"flags": ["--speaker", "Nobody"]}, "no speaker 'Nobody'"),
        ({"flags": ["--window", "0", "1", "1"]}, "chunk must be at least 1"),
        ({"flags": ["--text-tokens", "1"]}, "--text-tokens 1: speech needs at least 2"),
        ({"flags": ["--strategies", "static-overlap", "--without", "speech"]}, "overlaps text and speech"),
        ({"flags": ["--decode-budget", "9"]}, "cache_implementation='static' does not go with decode_budget="),
        ({"method": "full", "ratio": "1", "flags": ["--talker-decode-budget", "9"]}, "decode_budget"),
        ({"method": "kvzip", "flags": ["--compress-talker"]}, "a talker cannot"),
        ({"method": "snapkv:cache_implementation=static", "flags": ["--compress-talker"]}, "takes no static cache"),
        ({"flags": ["--prompts", "nothing.jsonl"]}, "nothing.jsonl"),
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"model": "OTHER"}, "is a qwen2 model; speech is measured for qwen2_5_omni"),
        ({"flags": ["--out", "FILE/x"]}, "prompts.jsonl' cannot be written: "),
        ({"flags": ["--device", "cuda:77"]}, "device 'cuda:77' cannot be used"),
        ({"flags": ["--save-audio", "FILE/x"]}, "prompts.jsonl/x' cannot be written: "),
    ],
)
def test_what_cannot_be_is_said_in_one_line(omni_checkpoint, tmp_path, capsys, change, message):
    (tmp_path / "prompts.jsonl").write_text('{"text": "Hello"}\n')
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    given = {"model": omni_checkpoint, "method": "snapkv", "ratio": "0.3", "flags": [], **change}
    words = [given["model"], given["method"], given["ratio"], *quick(tmp_path), *given["flags"]]
    files = {"OTHER": str(tmp_path), "FILE/x": str(tmp_path / "prompts.jsonl" / "x")}
    arguments = [files.get(word, word) for word in words]
    assert main(["speech", *arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line


@pytest.mark.slow
def test_a_signal_ends_a_cold_start():
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    begin = time.monotonic()
    with interruptible(), pytest.raises(KeyboardInterrupt):
        speech_run.in_a_fresh_process(time.sleep, 60)
    assert time.monotonic() - begin < 30
    assert not multiprocessing.active_children()


# Sound


def write_wav(file: Path, sound: torch.Tensor) -> None:
    with growing_wav(file) as write:
        write(sound)


def test_a_growing_wav_file_can_be_heard_after_each_block(tmp_path):
    with growing_wav(tmp_path / "a.wav") as write:
        for heard in (3, 6):
            write(torch.tensor([0.5, -2.0, 1.0]))
            with wave.open(str(tmp_path / "a.wav")) as sound:
                samples = np.frombuffer(sound.readframes(99), np.int16)
            assert samples.tolist() == [16383, -32767, 32767] * (heard // 3)


def test_the_table_says_what_was_streamed(run, capsys):
    content = run("--strategies", "dynamic", "--window", "4", "2", "1", "--codec-tokens", "30")
    (row,) = content["warm"][0]["answers"]
    assert row["first_audio_s"] < row["waveform_s"]
    assert row["audio_s"] == pytest.approx((30 - UNHEARD) * CODE_S)
    out = capsys.readouterr().out
    assert "4 blocks of codec tokens at a time, with token2wav seeing 2 blocks before and 1 after" in out
    header = next(line for line in out.splitlines() if line.startswith("| start"))
    assert [name in header for name in ("first byte s", "whole waveform s", "underruns")] == [True] * 3
    content = run("--strategies", "dynamic", "--one-piece")
    (row,) = content["warm"][0]["answers"]
    assert row["first_audio_s"] == row["waveform_s"]
    out = capsys.readouterr().out
    assert "made in one piece" in out
    assert "underruns" not in out


# Prompts


@pytest.mark.parametrize(("part", "kept"), [("vision", 2), ("audio", 2), ("speech", 4)])
def test_bundled_prompts_need_no_part_that_is_left_out(part, kept):
    assert len(bundled_prompts(16_000, [part])) == kept


def test_a_prompt_file_brings_its_picture_and_its_sound(tmp_path):
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a.png")
    sound = torch.linspace(-0.5, 0.5, 2400)
    write_wav(tmp_path / "a.wav", sound)
    (tmp_path / "p.jsonl").write_text('\n{"text": "Hello", "image": "a.png", "audio": "a.wav"}\n{"text": "x"}\n')
    both, text = read_prompts(tmp_path / "p.jsonl", answering.SAMPLING_RATE, [])
    assert both.image.size == (40, 30)
    assert torch.allclose(torch.from_numpy(both.audio), sound, atol=1e-4)
    assert text.image is text.audio is None


def test_a_prompt_may_hold_separators_of_lines_other_than_the_files(tmp_path):
    said = "one\u2028two\x85three"
    (tmp_path / "p.jsonl").write_bytes(f'{{"text": "{said}"}}\r\n{{"text": "x"}}\r\n'.encode())
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.jsonl", 16_000, [])] == [said, "x"]


@pytest.mark.parametrize(
    ("line", "without", "message"),
    [
        ('{"text": "x", "audio": "a.wav"}', [], "24000 Hz and 16 bits; 16000 Hz and 16 bits are needed"),
        ('{"text": "x", "audio": "no.wav"}', [], "there is no file"),
        ('{"text": "x", "audio": "p.jsonl"}', [], "is not a WAV file"),
        ('{"text": "x", "image": "a.wav"}', [], "is not a picture"),
        ('{"text": "x", "image": "a.eps"}', [], "convert it to PNG"),
        ('{"text": "x", "image": "a.png"}', ["vision"], "needs the vision tower, which --without vision leaves out"),
        ('{"txt": "x"}', [], "p.jsonl:1 needs text"),
        ("{", [], "p.jsonl:1"),
        ("", [], "has no prompts"),
    ],
)
def test_a_wrong_prompt_is_named(tmp_path, line, without, message):
    for name in ("a.png", "a.eps"):
        Image.new("RGB", (40, 30)).save(tmp_path / name)
    write_wav(tmp_path / "a.wav", torch.zeros(100))
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(KVCompressError, match=message):
        read_prompts(tmp_path / "p.jsonl", 16_000, without)


@pytest.mark.slow
def test_the_script_measures_in_fresh_processes_what_it_prints(omni_checkpoint, tmp_path):
    """The whole command, with the compiler and with the bundled prompts; only its installation does nothing."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncase "$*" in *"pip install"*) ;; *) exec {sys.executable} "$@";; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        [
            *(ROOT / "scripts" / "run_speech.sh", omni_checkpoint, "snapkv", "0.3", "--cold", "1", "--repeats", "1"),
            *("--text-tokens", "4", "--codec-tokens", "5", "--threads", "1", "--device", "cpu"),
            *("--strategies", "dynamic", "compressed-static", "--out", "speech", "--html"),
        ],
        cwd=tmp_path,
        env=os.environ | {"VIRTUAL_ENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "speech.json").read_text())
    cold = {taken["strategy"]: taken["answer"]["total_s"] for taken in content["cold"]}
    warm = {name: [] for name in cold}
    for row in content["warm"][0]["answers"]:
        warm[row["strategy"]].append(row["total_s"])
    assert cold["compressed-static"] > 3 * max(warm["compressed-static"])  # it compiled
    assert len(warm["dynamic"]) == len(bundled_prompts(16_000, []))
    assert (tmp_path / "speech.md").read_text() in done.stdout
    assert len(list((tmp_path / "speech-audio").glob("*.wav"))) == 2 * len(warm["dynamic"])
    assert (tmp_path / "speech.html").read_text().count("data:audio/wav;base64,") == 2 * len(warm["dynamic"])
