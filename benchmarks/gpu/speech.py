"""Time to first audio of a full-size Qwen2.5-Omni with random weights, with transformers' cache and with snapkv's.

Thinker, talker and token2wav have transformers' default config and are created on the device. Speech from random
weights is noise, but takes the same time. All answers have the same length."""

import gc
import json
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import DynamicCache, Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

import kvcompress
from benchmarks.driver import FOLDER, new_parser, start
from kvcompress import speech
from kvcompress.files import write_text

METHOD, RATIO = "snapkv", 0.1
REPEATS = 2
REFERENCE_FRAMES = 200  # frames of the speaker's voice


def omni(config: Qwen2_5OmniConfig, device: torch.device, dtype: torch.dtype) -> Qwen2_5OmniForConditionalGeneration:
    """Create the model, with one speaker of noise."""
    config.enable_audio_output = True
    torch.manual_seed(0)
    with device:
        model = Qwen2_5OmniForConditionalGeneration._from_config(config, dtype=dtype).eval()
        if not model.has_talker:
            model.enable_talker()
    model.token2wav.float()
    wave = config.token2wav_config.dit_config
    voice = {"cond": torch.randn(1, wave.enc_emb_dim), "ref_mel": torch.randn(1, REFERENCE_FRAMES, wave.mel_dim)}
    voice = {name: part.to(device) for name, part in voice.items()}
    model.speaker_map = {"noise": {**voice, "bos_token": config.talker_config.tts_text_start_token_id}}
    model.thinker.generation_config.eos_token_id = 0
    return model


def answered(
    model: Qwen2_5OmniForConditionalGeneration, ids: torch.Tensor, lengths: tuple[int, int], ours: bool
) -> dict:
    inputs, thinker = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, model.thinker
    if not ours:
        cache = DynamicCache(config=thinker.config)
        answer = speech.answer(model, inputs, *lengths, exact=True, cache=cache)
    else:
        cache = kvcompress.CompressedCache(thinker.config, METHOD, RATIO, max_new_tokens=lengths[0] + 1)
        with kvcompress.attach(thinker):
            answer = speech.answer(model, inputs, *lengths, exact=True, cache=cache)
    row: dict[str, Any] = asdict(replace(answer, text=None, waveform=None))
    return {**row, "audio_s": answer.audio_s, "real_time_factor": answer.real_time_factor}


def main(argv: list[str]) -> None:
    parser = new_parser("gpu.speech", __doc__, device="cuda", out=FOLDER / "gpu" / "speech")
    parser.add_argument("--smoke", action="store_true", help="tiny parts, short answers")
    given = parser.parse_args(argv)
    config, dtype, prompt, lengths = Qwen2_5OmniConfig(), torch.bfloat16, 8192, (64, 200)
    if given.smoke:
        from tests.support.omni import tiny_config

        config, dtype, prompt, lengths = tiny_config(), torch.float32, 48, (6, 12)
    model = omni(config, torch.device(given.device), dtype)
    # From the lower half of the vocabulary, as placeholders have high ids; in the tiny vocabulary they have low ids.
    vocabulary = config.thinker_config.text_config.vocab_size // 2
    ids = torch.randint(16, vocabulary, (1, prompt), generator=torch.Generator().manual_seed(0)).to(given.device)
    answers: dict[str, list[dict]] = {"transformers DynamicCache": [], f"{METHOD}@{RATIO:g}": []}
    for repeat in range(REPEATS + 1):
        for name, found in answers.items():
            row = answered(model, ids, lengths, ours=name.startswith(METHOD))
            gc.collect()
            if repeat:  # the first repeat warms up
                found.append(row)
        if repeat:
            content = {"prompt": prompt, "text_tokens": lengths[0], "codec_tokens": lengths[1], "answers": answers}
            write_text(given.out.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
            print(f"repeat {repeat}: {json.dumps(answers)}", flush=True)


if __name__ == "__main__":
    start(main)
