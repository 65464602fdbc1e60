"""Speech: Qwen2.5-Omni with tiny random parts answers aloud under compression, and what that costs is told right."""

import json
import os
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    CompileConfig,
    PreTrainedTokenizerFast,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

import kvcompress
from kvcompress import CompressedCache, KVCompressError, speech
from kvcompress.__main__ import main
from kvcompress.bench import speech as command
from kvcompress.tokens.base import TokenMethod

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SPECIALS = [
    "<pad>", "<|AUDIO|>", "<|IMAGE|>", "<|VIDEO|>", "<|audio_bos|>", "<|audio_eos|>", "<|vision_bos|>",
    "<|vision_eos|>", "<|tts_bos|>", "<|tts_eos|>", "<|tts_pad|>", "<eos>", "<unk>",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% else %}<|audio_bos|><|AUDIO|><|audio_eos|>{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
HIDDEN, MEL, CODES = 64, 8, 72
MEDIA_IDS = {
    "audio_token_index": 1,
    "image_token_index": 2,
    "video_token_index": 3,
    "audio_start_token_id": 4,
    "audio_end_token_id": 5,
    "vision_start_token_id": 6,
    "vision_end_token_id": 7,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
CODE_S = 480 / 24_000  # a codec token is two frames of 240 samples


def tiny_config() -> Qwen2_5OmniConfig:
    return Qwen2_5OmniConfig(
        thinker_config={
            "text_config": {
                "vocab_size": 128,
                "hidden_size": HIDDEN,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_parameters": ROPE,
                "tie_word_embeddings": False,
                "pad_token_id": 0,
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "window_size": 56,
                "fullatt_block_indexes": [1],
                "out_hidden_size": HIDDEN,
            },
            "audio_config": {
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "d_model": 32,
                "n_window": 10,
                "output_dim": HIDDEN,
                "max_source_positions": 300,
            },
            **MEDIA_IDS,
        },
        talker_config={
            "vocab_size": CODES,
            "tts_text_start_token_id": 8,
            "tts_text_end_token_id": 9,
            "tts_text_pad_token_id": 10,
            "tts_codec_pad_token_id": 65,
            "tts_codec_start_token_id": 66,
            "tts_codec_end_token_id": 67,
            "tts_codec_mask_token_id": 68,
            "embedding_size": HIDDEN,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": ROPE,
            **MEDIA_IDS,
        },
        token2wav_config={
            "dit_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 16,
                "emb_dim": 16,
                "num_embeds": CODES,
                "mel_dim": MEL,
                "enc_emb_dim": 8,
                "enc_dim": 8,
                "enc_channels": [16, 16, 16, 16, 48],
                "enc_attention_channels": 8,
                "enc_res2net_scale": 2,
                "enc_se_channels": 8,
                "look_ahead_layers": [1],
                "look_backward_layers": [0],
                "block_size": 4,
            },
            "bigvgan_config": {
                "mel_dim": MEL,
                "upsample_initial_channel": 64,
                "resblock_kernel_sizes": [3],
                "resblock_dilation_sizes": [[1, 3, 5]],
            },
        },
    )


def tiny_processor() -> Qwen2_5OmniProcessor:
    """One token per character."""
    vocabulary = [*SPECIALS, "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    names = ("audio", "image", "video", "audio_bos", "audio_eos", "vision_bos", "vision_eos")
    named = {f"{name}_token": token for name, token in zip(names, SPECIALS[1:8], strict=True)}
    size = {"shortest_edge": 32 * 32, "longest_edge": 112 * 112}
    return Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        video_processor=Qwen2VLVideoProcessor(size=size),
        feature_extractor=WhisperFeatureExtractor(feature_size=16, chunk_length=4, return_attention_mask=True),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            eos_token="<eos>",
            unk_token="<unk>",
            extra_special_tokens=named,
        ),
        chat_template=CHAT_TEMPLATE,
    )


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Peaked attention, as in tests/support/families.py: what is dropped then makes a difference."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and not name.startswith("token2wav"):
            scale = 3.0 if name.endswith("q_proj.weight") else 1.0
            weight.normal_(std=scale * weight[0].numel() ** -0.5, generator=generator)
    model.thinker.lm_head.weight[: len(SPECIALS)] = 0  # special tokens are never the most likely


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("omni")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2_5OmniForConditionalGeneration(tiny_config())
        names = ("Chelsie", "Ethan")
        speakers = {name: {"cond": torch.randn(1, 8), "ref_mel": torch.randn(1, 20, MEL)} for name in names}
    randomize(model)
    model.save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    torch.save({name: {**speaker, "bos_token": 8} for name, speaker in speakers.items()}, folder / "spk_dict.pt")
    return str(folder)


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return speech.load(checkpoint, "float32", CPU)


@pytest.fixture(scope="module")
def inputs(loaded) -> dict[str, torch.Tensor]:
    """A prompt with a picture and sound."""
    model, processor = loaded
    prompt = command.bundled_prompts(16_000, [])[-1]
    return command.model_inputs(processor, prompt, model.device)


@pytest.fixture
def eager_compile(monkeypatch):
    """The compiled path without a compiler behind it, which takes half a minute."""

    def config(device: torch.device) -> CompileConfig:
        config = CompileConfig(fullgraph=True, backend="eager")
        config._compile_all_devices = True
        return config

    monkeypatch.setattr(command, "compile_config", config)


@pytest.fixture
def run(checkpoint, loaded, tmp_path, monkeypatch):
    """The command on one prompt, whose cold starts are in this process; returns the JSON. A whole model is loaded once
    for all tests."""
    load = speech.load
    monkeypatch.setattr(speech, "load", lambda *given: load(*given) if given[-1] else loaded)
    monkeypatch.setattr(command, "in_a_fresh_process", lambda function, *arguments: function(*arguments))
    (tmp_path / "prompts.jsonl").write_text('{"text": "Hello, who are you?"}\n')

    def call(*flags: str, method: str = "snapkv:window_size=4", ratio: str = "0.3") -> dict:
        given = [checkpoint, method, ratio, *quick(tmp_path), *flags]
        assert main(["speech", *given]) == 0
        return json.loads((tmp_path / "speech.json").read_text())

    return call


def quick(folder) -> list[str]:
    return [
        *("--device", "cpu", "--dtype", "float32", "--threads", "1", "--cold", "0", "--repeats", "1", "--exact"),
        *("--text-tokens", "4", "--codec-tokens", "5", "--out", str(folder / "speech")),
        *("--prompts", str(folder / "prompts.jsonl")),
    ]


def answered(loaded, inputs, **given) -> speech.Answer:
    return speech.answer(loaded[0], inputs, text_tokens=4, codec_tokens=5, exact=True, **given)


def compressed(
    loaded, inputs, method: str, ratio: float | None = None, **options
) -> tuple[speech.Answer, CompressedCache]:
    thinker = loaded[0].thinker
    cache = CompressedCache(thinker.config, method, ratio, max_new_tokens=5, **options)
    with kvcompress.attach(thinker):
        return answered(loaded, inputs, cache=cache), cache


# Answers


def test_full_says_exactly_what_the_plain_model_says(loaded, inputs):
    model, _ = loaded
    torch.manual_seed(0)
    pixels = {("thinker_" if name == "pixel_values" else "") + name: value for name, value in inputs.items()}
    text, waveform = model.generate(
        **pixels,
        thinker_max_new_tokens=4,
        thinker_min_new_tokens=4,
        thinker_do_sample=False,
        talker_max_new_tokens=5,
        talker_min_new_tokens=5,
        talker_eos_token_id=[65, 67],
    )
    answer, _ = compressed(loaded, inputs, "full")
    assert torch.equal(answer.text, text[0, inputs["input_ids"].shape[1] :])
    assert torch.equal(answer.waveform, waveform)
    assert torch.equal(answered(loaded, inputs).waveform, waveform)


KV_METHODS = [
    name
    for name, info in kvcompress.list_methods().items()
    if info.cls.__module__.startswith("kvcompress.") and not issubclass(info.cls, TokenMethod) and name != "full"
]


@pytest.mark.parametrize("method", KV_METHODS)
def test_every_kv_method_compresses_the_thinker_and_is_heard(loaded, inputs, method):
    answer, cache = compressed(loaded, inputs, method, 0.3)
    kept = np.mean(cache.realised_ratios())
    assert kept == pytest.approx(0.3, abs=0.01)
    assert len(answer.text) == 4
    assert answer.audio_s == pytest.approx(5 * CODE_S)
    assert answer.waveform.isfinite().all()


def test_compress_on_the_whole_model_compresses_its_thinker(loaded, inputs):
    model, _ = loaded
    with kvcompress.compress(model, "random", ratio=0.1, window_size=1) as session:
        changed = answered(loaded, inputs)
    assert np.mean(session.cache.realised_ratios()) == pytest.approx(0.1, abs=0.01)
    plain = answered(loaded, inputs)
    assert not torch.equal(changed.waveform, plain.waveform)
    assert torch.equal(plain.waveform, answered(loaded, inputs).waveform)


def test_the_talkers_cache_can_be_compressed(loaded, inputs):
    model, _ = loaded
    cache = CompressedCache(model.talker.config, "snapkv", 0.2, window_size=4)
    with kvcompress.attach(model.talker):
        answer = answered(loaded, inputs, talker_cache=cache)
    assert np.mean(cache.realised_ratios()) == pytest.approx(0.2, abs=0.01)
    assert torch.equal(answer.text, answered(loaded, inputs).text)
    assert len(answer.waveform) == 5 * 480


def test_times_follow_the_order_of_the_work(loaded, inputs):
    answer = answered(loaded, inputs)
    order = [answer.first_text_s, answer.text_s, answer.first_code_s, answer.codes_s, answer.first_audio_s]
    assert order[0] > 0
    assert order == sorted(set(order))
    assert answer.first_audio_s == answer.total_s  # the waveform comes in one piece
    assert answer.codes == 5
    assert answer.real_time_factor == pytest.approx(answer.total_s / (5 * CODE_S))


def test_an_answer_of_one_token_cannot_be_spoken(loaded, inputs):
    with pytest.raises(KVCompressError, match="text_tokens=1"):
        speech.answer(loaded[0], inputs, text_tokens=1, codec_tokens=5)


# Parts


def test_parts_left_out_take_no_memory_and_the_rest_answers_the_same(checkpoint, loaded):
    model, processor = loaded
    whole = speech.weight_bytes(model)
    assert all(whole.values())
    assert sum(whole.values()) == sum(4 * weight.numel() for weight in model.parameters())
    small, _ = speech.load(checkpoint, "float32", CPU, ["vision", "audio", "speech"])
    left = speech.weight_bytes(small)
    assert left == {**dict.fromkeys(whole, 0), "language model": whole["language model"]}
    assert not hasattr(small, "talker")
    prompt = command.model_inputs(processor, command.Prompt("Hello there"), CPU)
    answer = speech.answer(small, prompt, text_tokens=4, codec_tokens=5, exact=True)
    assert answer.waveform is answer.real_time_factor is answer.first_audio_s is None
    assert torch.equal(answer.text, answered(loaded, prompt).text)


@pytest.mark.parametrize(("part", "kept"), [("vision", 2), ("audio", 2), ("speech", 4)])
def test_bundled_prompts_need_no_part_that_is_left_out(part, kept):
    assert len(command.bundled_prompts(16_000, [part])) == kept


def test_loading_without_a_tower_says_nothing_of_its_weights(checkpoint, capfd):
    speech.load(checkpoint, "float32", CPU, ["vision", "audio", "speech"])
    assert "UNEXPECTED" not in "".join(capfd.readouterr())


# The command


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
        assert row["audio_s"] == pytest.approx(5 * CODE_S)
        assert row["real_time_factor"] == pytest.approx(row["first_audio_s"] / row["audio_s"])
    assert rows["dynamic"]["text"] == rows["static"]["text"]
    assert rows["compressed"]["text"] == rows["compressed-static"]["text"]
    assert rows["compressed"]["kv_bytes"] < 0.5 * rows["dynamic"]["kv_bytes"]
    assert rows["compressed-static"]["realised_ratio"] == pytest.approx(0.3, abs=0.01)
    assert rows["dynamic"]["realised_ratio"] is None
    assert "| warm | snapkv:window_size=4:cache_implementation=static@0.3, compiled | 1 |" in capsys.readouterr().out


def test_compress_talker_makes_its_cache_smaller(run):
    (whole,) = run("--strategies", "compressed")["warm"][0]["answers"]
    (less,) = run("--strategies", "compressed", "--compress-talker")["warm"][0]["answers"]
    assert less["talker_kv_bytes"] < 0.6 * whole["talker_kv_bytes"]
    assert less["kv_bytes"] == whole["kv_bytes"]


def test_without_speech_the_table_has_no_empty_columns(run, capsys):
    content = run("--strategies", "compressed", "--without", "vision", "audio", "speech")
    assert content["weight_bytes"]["talker"] == content["weight_bytes"]["vision"] == 0
    out = capsys.readouterr().out
    assert "first text s" in out
    assert "real-time factor" not in out
    assert "talker" not in out.split("Weights")[1].split("|")[0]


def test_a_cold_start_is_the_first_answer_after_loading(run, monkeypatch, capsys):
    loads, disabled, load, answer = [], [], command.load, speech.answer

    def answers(*given):
        disabled.append(command.inductor_config.force_disable_caches)
        return answer(*given)

    monkeypatch.setattr(command, "load", lambda given: loads.append(len(disabled)) or load(given))
    monkeypatch.setattr(speech, "answer", answers)
    content = run("--strategies", "dynamic", "compressed", "--cold", "2")
    assert [(taken["strategy"], taken["prompt"]) for taken in content["cold"]] == [
        *(("dynamic", 0), ("compressed", 0), ("dynamic", 1), ("compressed", 1))
    ]
    assert loads == [0, 1, 2, 3, 4]  # each cold start loads anew, and answers once
    assert disabled == [True] * 4 + [False] * 4
    assert "| cold | snapkv:window_size=4@0.3 | 2 |" in capsys.readouterr().out


def test_a_run_goes_on_where_it_stopped(run, monkeypatch):
    first = run("--strategies", "dynamic", "--cold", "1")
    asked = []
    monkeypatch.setattr(command, "in_a_fresh_process", lambda function, given, *at: asked.append(at) or {"error": "x"})
    second = run("--strategies", "dynamic", "--cold", "2", "--repeats", "2", "--resume")
    assert asked == [("dynamic", 1)]
    assert second["cold"][0] == first["cold"][0]
    assert second["warm"][0] == first["warm"][0]
    assert [taken["repeat"] for taken in second["warm"]] == [1, 2]


def test_memory_that_runs_out_is_written_down(run, monkeypatch, capsys):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(speech, "answer", fails)
    content = run("--strategies", "dynamic")
    assert content["warm"][0]["answers"] == [{"strategy": "dynamic", "prompt": 0, "error": "out of memory"}]
    assert "transformers DynamicCache (out of memory) | 0 |" in capsys.readouterr().out


def test_saved_audio_is_what_was_measured(run, tmp_path):
    content = run("--strategies", "dynamic", "--save-audio", str(tmp_path / "heard"))
    with wave.open(str(tmp_path / "heard" / "dynamic-0.wav")) as sound:
        seconds = sound.getnframes() / sound.getframerate()
    assert seconds == content["warm"][0]["answers"][0]["audio_s"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "snapkw"}, "did you mean 'snapkv'"),
        ({"ratio": "1.5"}, "1.5"),
        ({"method": "fastv"}, "talker reads all of them"),
        ({"method": "snapkv:first_token=compressed"}, "first_token"),
        ({"method": "snapkv:prefill_chunk=8"}, "all but the last chunk"),
        ({"flags": ["--strategies", "statik"]}, "no strategy 'statik' (did you mean 'static'?)"),
        ({"flags": ["--without", "ears"]}, "no part 'ears'"),
        ({"flags": ["--speaker", "Nobody"]}, "no speaker 'Nobody'"),
        ({"flags": ["--text-tokens", "1"]}, "--text-tokens 1: at least 2"),
        ({"method": "kvzip", "flags": ["--compress-talker"]}, "a talker cannot"),
        ({"method": "snapkv:cache_implementation=static", "flags": ["--compress-talker"]}, "takes no static cache"),
        ({"flags": ["--prompts", "nothing.jsonl"]}, "nothing.jsonl"),
        ({"model": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(checkpoint, tmp_path, capsys, change, message):
    (tmp_path / "prompts.jsonl").write_text('{"text": "Hello"}\n')
    given = {"model": checkpoint, "method": "snapkv", "ratio": "0.3", "flags": [], **change}
    arguments = [given["model"], given["method"], given["ratio"], *quick(tmp_path), *given["flags"]]
    assert main(["speech", *arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvcompress: ")]
    assert message in line


def test_another_model_is_refused(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"text": "Hello"}\n')
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert main(["speech", str(tmp_path), "snapkv", "0.3", *quick(tmp_path)]) == 2
    assert "is a qwen2 model; speech is measured for qwen2_5_omni" in capsys.readouterr().err


# Prompts


def test_a_prompt_file_brings_its_picture_and_its_sound(tmp_path):
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a.png")
    sound = torch.linspace(-0.5, 0.5, 2400)
    command.write_wav(tmp_path / "a.wav", sound)
    (tmp_path / "p.jsonl").write_text('\n{"text": "Hello", "image": "a.png", "audio": "a.wav"}\n{"text": "x"}\n')
    both, text = command.read_prompts(tmp_path / "p.jsonl", speech.SAMPLING_RATE, [])
    assert both.image.size == (40, 30)
    assert torch.allclose(torch.from_numpy(both.audio), sound, atol=1e-4)
    assert text.image is text.audio is None


@pytest.mark.parametrize(
    ("line", "without", "message"),
    [
        ('{"text": "x", "audio": "a.wav"}', [], "24000 Hz and 16 bits; 16000 Hz and 16 bits are needed"),
        ('{"text": "x", "audio": "no.wav"}', [], "there is no file"),
        ('{"text": "x", "audio": "p.jsonl"}', [], "is not a WAV file"),
        ('{"text": "x", "image": "a.wav"}', [], "is not a picture"),
        ('{"text": "x", "image": "a.png"}', ["vision"], "needs the vision tower, which --without vision leaves out"),
        ('{"txt": "x"}', [], "p.jsonl:1 needs text"),
        ("{", [], "p.jsonl:1"),
        ("", [], "has no prompts"),
    ],
)
def test_a_wrong_prompt_is_named(tmp_path, line, without, message):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    command.write_wav(tmp_path / "a.wav", torch.zeros(100))
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(KVCompressError, match=message):
        command.read_prompts(tmp_path / "p.jsonl", 16_000, without)


@pytest.mark.slow
def test_the_script_measures_in_fresh_processes_what_it_prints(checkpoint, tmp_path):
    """The whole command, with the compiler and with the bundled prompts; only its installation does nothing."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\ncase "$*" in *"pip install"*) ;; *) exec {sys.executable} "$@";; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        [
            *(ROOT / "scripts" / "run_speech.sh", checkpoint, "snapkv", "0.3", "--cold", "1", "--repeats", "1"),
            *("--text-tokens", "4", "--codec-tokens", "5", "--threads", "1", "--device", "cpu"),
            *("--strategies", "dynamic", "compressed-static", "--out", "speech"),
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
    assert len(warm["dynamic"]) == len(command.bundled_prompts(16_000, []))
    assert (tmp_path / "speech.md").read_text() in done.stdout
