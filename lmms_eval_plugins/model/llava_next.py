"""Checkpoints in the layout of the original LLaVA-NeXT code, loaded as transformers' LLaVA-OneVision.

`lmms-lab/llava-onevision-qwen2-7b-ov` and its siblings have `model_type: llava_qwen`, which only the `llava` package
knows. The network is that of `LlavaOnevisionForConditionalGeneration`: a SigLIP tower without its last layer, final
norm and head; a two-layer projector; Qwen2. So this module maps the names of weights and settings, and transformers
loads the shards.
Facts: https://github.com/LLaVA-VL/LLaVA-NeXT (llava/model), and the config.json of that checkpoint.
"""

import re
from typing import Any

from transformers import (
    AutoTokenizer,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedConfig,
    Qwen2Config,
    SiglipVisionConfig,
)

from kvcompress import KVCompressError

# mm_vision_tower -> the tower in the checkpoint, which lacks the last of its 27 layers (mm_vision_select_layer -2).
VISION_TOWERS: dict[str, dict[str, Any]] = {
    "google/siglip-so400m-patch14-384": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 26,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    }
}
# Prefix of an original name -> transformers' prefix, applied in this order.
WEIGHT_NAMES = {
    r"^model\.vision_tower\.vision_tower\.": "model.vision_tower.",
    r"^model\.mm_projector\.0\.": "model.multi_modal_projector.linear_1.",
    r"^model\.mm_projector\.2\.": "model.multi_modal_projector.linear_2.",
    r"^model\.(layers|embed_tokens|norm)\.": r"model.language_model.\1.",
}
# Settings that are fixed in transformers' network; a checkpoint with other values would load and answer nonsense.
FIXED_SETTINGS = {
    "mm_projector_type": "mlp2x_gelu",
    "mm_patch_merge_type": "spatial_unpad",
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "patch",
    "mm_newline_position": "one_token",
    "mm_resampler_type": None,
    "mm_use_im_start_end": False,
    "rope_scaling": None,
}
TEXT_SETTINGS = (
    "attention_dropout",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
)
IMAGE_MEAN = IMAGE_STD = (0.5, 0.5, 0.5)  # SigLIP's
# The original code's conversation `qwen_1_5`, with media where they occur in the message.
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<{{ part['type'] }}>\n{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def is_llava_next(config: dict[str, Any]) -> bool:
    """Return whether a raw config.json has the original layout."""
    return config.get("model_type") == "llava_qwen" or "LlavaQwenForCausalLM" in (config.get("architectures") or [])


def load_processor(pretrained: str, config: dict[str, Any], revision: str = "main") -> LlavaOnevisionProcessor:
    """Build transformers' processor from a checkpoint's raw `config`, with the checkpoint's own tokenizer."""
    vision = _vision_config(config)
    size = {"height": vision.image_size, "width": vision.image_size}
    # With an empty config, AutoTokenizer reads tokenizer_config.json instead of failing on the unknown model_type.
    tokenizer = AutoTokenizer.from_pretrained(pretrained, revision=revision, config=PreTrainedConfig())
    tokenizer.add_tokens(["<image>", "<video>"], special_tokens=True)
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(
            size=size,
            image_mean=IMAGE_MEAN,
            image_std=IMAGE_STD,
            image_grid_pinpoints=_grid_pinpoints(config),
        ),
        video_processor=LlavaOnevisionVideoProcessor(size=size, image_mean=IMAGE_MEAN, image_std=IMAGE_STD),
        tokenizer=tokenizer,
        num_image_tokens=(vision.image_size // vision.patch_size) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=config["image_aspect_ratio"],
        chat_template=CHAT_TEMPLATE,
    )


def load_model(
    pretrained: str, config: dict[str, Any], tokenizer: Any, revision: str = "main", **load_arguments: Any
) -> LlavaOnevisionForConditionalGeneration:
    """Load the model; `load_arguments` (dtype, device_map, ...) go to `from_pretrained`.

    Raises KVCompressError if the checkpoint has settings that transformers' network does not support, or lacks weights.
    """
    model_config = convert_config(config, tokenizer)
    if load_arguments.get("dtype") == "auto":
        load_arguments["dtype"] = config.get("torch_dtype") or "auto"
    model, loaded = LlavaOnevisionForConditionalGeneration.from_pretrained(
        pretrained,
        config=model_config,
        key_mapping=WEIGHT_NAMES,
        revision=revision,
        output_loading_info=True,
        **load_arguments,
    )
    wrong = {kind: sorted(loaded[kind]) for kind in ("missing_keys", "mismatched_keys") if loaded[kind]}
    if wrong:
        raise KVCompressError(f"{pretrained} is not a complete LLaVA-NeXT checkpoint: {wrong}")
    return model


def convert_config(config: dict[str, Any], tokenizer: Any) -> LlavaOnevisionConfig:
    """Convert a raw config.json of the original layout to transformers' config. Raises KVCompressError."""
    for name, fixed in FIXED_SETTINGS.items():
        if config.get(name, fixed) != fixed:
            raise KVCompressError(f"LLaVA-NeXT checkpoint with {name}={config[name]!r}: only {fixed!r} is supported")
    aspect_ratio = config.get("image_aspect_ratio")
    if not str(aspect_ratio).startswith("anyres_max_"):
        raise KVCompressError(f"LLaVA-NeXT checkpoint with image_aspect_ratio={aspect_ratio!r}: only anyres_max_N")
    image_token, video_token = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    if max(image_token, video_token) >= config["vocab_size"]:
        raise KVCompressError(f"<image> and <video> do not fit in the vocabulary of {config['vocab_size']} tokens")
    return LlavaOnevisionConfig(
        vision_config=_vision_config(config),
        text_config=_text_config(config),
        image_token_index=image_token,
        video_token_index=video_token,
        image_grid_pinpoints=_grid_pinpoints(config),
        vision_aspect_ratio=aspect_ratio,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=config.get("tie_word_embeddings", False),
    )


def _vision_config(config: dict[str, Any]) -> SiglipVisionConfig:
    tower = config.get("mm_vision_tower")
    if tower not in VISION_TOWERS:
        raise KVCompressError(f"LLaVA-NeXT checkpoint with mm_vision_tower={tower!r}: only {', '.join(VISION_TOWERS)}")
    return SiglipVisionConfig(vision_use_head=False, **VISION_TOWERS[tower])


def _grid_pinpoints(config: dict[str, Any]) -> list[list[int]]:
    """Return anyres resolutions as (height, width); the original has (width, height), or tiles `(1x1),...,(6x6)`."""
    pinpoints = config["image_grid_pinpoints"]
    if isinstance(pinpoints, str):
        tile = VISION_TOWERS[config["mm_vision_tower"]]["image_size"]
        (low_w, low_h), *_, (high_w, high_h) = [map(int, pair) for pair in re.findall(r"(\d+)x(\d+)", pinpoints)]
        pinpoints = [[w * tile, h * tile] for w in range(low_w, high_w + 1) for h in range(low_h, high_h + 1)]
    return [[height, width] for width, height in pinpoints]


def _text_config(config: dict[str, Any]) -> Qwen2Config:
    return Qwen2Config(
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        **{name: config[name] for name in TEXT_SETTINGS if name in config},
    )
