"""A Qwen2.5-Omni with tiny random parts: thinker, talker and token2wav, with processor and speakers."""

import inspect
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

from kvcompress.speech import answering

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
    "audio_token_index": 1, "image_token_index": 2, "video_token_index": 3, "audio_start_token_id": 4,
    "audio_end_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
PARTS = ("thinker", "talker")
CODE_S = 480 / 24_000  # a codec token is two frames of 240 samples
# transformers 5.14 never speaks the last codec token.
UNHEARD = int("talker_input_ids.shape[1] : -1]" in inspect.getsource(Qwen2_5OmniForConditionalGeneration.generate))


def save_checkpoint(folder: Path) -> str:
    """Save the model with its processor and two speakers; return the folder's name."""
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


def tiny_config() -> Qwen2_5OmniConfig:
    return Qwen2_5OmniConfig(
        thinker_config={
            "text_config": {
                "vocab_size": 128, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": ROPE,
                "tie_word_embeddings": False, "pad_token_id": 0,
            },
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "window_size": 56,
                "fullatt_block_indexes": [1], "out_hidden_size": HIDDEN,
            },
            "audio_config": {
                "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
                "d_model": 32, "n_window": 10, "output_dim": HIDDEN, "max_source_positions": 300,
            },
            **MEDIA_IDS,
        },
        talker_config={
            "vocab_size": CODES, "tts_text_start_token_id": 8, "tts_text_end_token_id": 9, "tts_text_pad_token_id": 10,
            "tts_codec_pad_token_id": 65, "tts_codec_start_token_id": 66, "tts_codec_end_token_id": 67,
            "tts_codec_mask_token_id": 68, "embedding_size": HIDDEN, "hidden_size": 48, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16,
            "rope_parameters": ROPE, **MEDIA_IDS,
        },
        token2wav_config={
            "dit_config": {
                "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "emb_dim": 16,
                "num_embeds": CODES, "mel_dim": MEL, "enc_emb_dim": 8, "enc_dim": 8,
                "enc_channels": [16, 16, 16, 16, 48], "enc_attention_channels": 8, "enc_res2net_scale": 2,
                "enc_se_channels": 8, "look_ahead_layers": [1], "look_backward_layers": [0], "block_size": 4,
            },
            "bigvgan_config": {
                "mel_dim": MEL,
                "upsample_initial_channel": 64,
                "resblock_kernel_sizes": [3],
                "resblock_dilation_sizes": [[1, 3, 5]],
            },
        },
    )  # fmt: skip


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
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
            extra_special_tokens=named,
        ),
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Make attention peaked, as in families.py, so that dropped entries make a difference."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.ndim >= 2 and not name.startswith("token2wav"):
            scale = 3.0 if name.endswith("q_proj.weight") else 1.0
            weight.normal_(std=scale * weight[0].numel() ** -0.5, generator=generator)
    model.thinker.lm_head.weight[: len(SPECIALS)] = 0  # special tokens are never the most likely
    randomize_sound(model.token2wav)


@torch.no_grad()
def randomize_sound(token2wav: torch.nn.Module) -> None:
    """Make weights so large that each block of the spectrogram depends on its neighbours, and that the sound is
    audible."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in token2wav.named_parameters():
        if weight.ndim >= 2:
            scale = 1.0 if "dit" in name else 0.7
            weight.normal_(std=scale * weight[0].numel() ** -0.5, generator=generator)


def lengths(text: int, codes: int) -> dict[str, int]:
    """Arguments of `generate` for exactly as many tokens of text and of speech."""
    of = dict(zip(PARTS, (text, codes), strict=True))
    return {f"{part}_{name}": of[part] for part in PARTS for name in ("max_new_tokens", "min_new_tokens")}


def to_generate(inputs: dict[str, torch.Tensor], text: int, codes: int) -> dict[str, Any]:
    """What `generate` is given for a prompt and an answer of these lengths."""
    return {**answering._for_thinker_only(inputs), "talker_eos_token_id": [65, 67], **lengths(text, codes)}
