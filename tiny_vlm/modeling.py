"""The tiny LLaVA-OneVision: configuration, tokenizer, processor.

Model, tokenizer and processor are transformers' own classes. A 156 x 156 image is one anyres tile. As with any image of
the tower's own size in LLaVA-OneVision, the prompt contains it twice: as the base view (169 tokens) and as the grid
view (13 rows of 13 tokens and a newline, 182 tokens). Larger images take up to four tiles.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)

from tiny_vlm.signs import FRAME_GRID, GRID, PATCH, PROMPT_WORDS, SIDE

PINPOINTS = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
BASE_TOKENS = GRID * GRID
GRID_TOKENS = GRID * (GRID + 1)
IMAGE_TOKENS = BASE_TOKENS + GRID_TOKENS
FRAME_TOKENS = FRAME_GRID * FRAME_GRID
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'video' %}{{ '<video>\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(words: Sequence[str] = PROMPT_WORDS, longest: int = 2048) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer for lower case: each of `words` is one token, all else is spelled byte by byte.

    So a word on a sign takes one token per character, in questions and answers. `longest`: tokens of a prompt.
    """
    pattern = "|".join(map(re.escape, words))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rf" ?(?<![a-z])(?:{pattern})(?![a-z])|[\s\S]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,  # more than all prompt words need: every one becomes a single token
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{word} {word}" for word in words], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>", "<image>", "<video>"],
        padding_side="left",
        model_max_length=longest,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionConfig:
    """Return the config: 2.4 M parameters, SigLIP with 3 layers, Qwen2 with 4 layers of 4 query and 2 KV heads."""
    vision = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    text = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",  # SigLIP has no class token to leave out
        vision_aspect_ratio="anyres_max_9",
        tie_word_embeddings=True,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionProcessor:
    from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionVideoProcessor  # need torchvision

    pixels = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(image_grid_pinpoints=PINPOINTS, **pixels),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(**pixels),
        num_image_tokens=BASE_TOKENS,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
        vision_aspect_ratio="anyres_max_9",
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaOnevisionForConditionalGeneration:
    """Build the model with fresh weights. The tower's position embeddings start as 2-D sinusoids, in which "the patch
    to my right" is the same rotation everywhere."""
    torch.manual_seed(seed)
    model = LlavaOnevisionForConditionalGeneration(build_config(tokenizer))
    # The path to the embedding differs between transformers releases.
    (positions,) = (
        p for n, p in model.model.vision_tower.named_parameters() if n.endswith("position_embedding.weight")
    )
    positions.data.copy_(0.5 * _sinusoids(positions.shape[1]))
    for layer in (model.model.multi_modal_projector.linear_1, model.model.multi_modal_projector.linear_2):
        nn.init.xavier_uniform_(layer.weight)  # transformers' default is ten times smaller and learns slower
    return model


def insert_layer(model: LlavaOnevisionForConditionalGeneration, place: int) -> None:
    """Insert layer number `place`, counted from 0, into the language model. It starts as a copy of the layer before it
    whose output is zero, so the model's function does not change."""
    decoder, config = model.model.language_model, model.config.text_config
    layer = copy.deepcopy(decoder.layers[place - 1])
    nn.init.zeros_(layer.self_attn.o_proj.weight)
    nn.init.zeros_(layer.mlp.down_proj.weight)
    decoder.layers.insert(place, layer)
    for number, each in enumerate(decoder.layers):
        each.self_attn.layer_idx = number
    config.num_hidden_layers = len(decoder.layers)
    config.layer_types = [config.layer_types[0]] * len(decoder.layers)


def _sinusoids(width: int) -> Tensor:
    """Return 2-D sinusoids (GRID * GRID, width): a quarter each of sin row, cos row, sin column, cos column."""
    frequencies = 2.5 * torch.exp(torch.linspace(0, -2.8, width // 4))  # radians per patch
    angle = torch.arange(GRID)[:, None] * frequencies
    columns = torch.cat((angle.sin(), angle.cos()), -1).expand(GRID, GRID, -1)
    return torch.cat((columns.transpose(0, 1), columns), -1).flatten(0, 1)
