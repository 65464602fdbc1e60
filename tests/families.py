"""Tiny random models of the supported families, and inputs for them: no hub, tokenizer or processor needed.

family = FAMILIES["qwen2-vl"]
model = family.build()                                         # fp32, eval, the same weights at each call
inputs = family.inputs(model, lengths=[17, 30], images=[1, 0])  # left-padded, as a processor would
model.generate(**inputs)
model(**family.solo(inputs, row=0))                            # row 0 alone, without its padding
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    InternVLConfig,
    LlamaConfig,
    LlavaOnevisionConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3VLConfig,
)

HEAD_DIM = 16
VOCAB_SIZE = 128
VISION_HIDDEN = 32
# Ids below FIRST_TEXT are special. Greedy decoding never picks them: their logits are zero (see _randomize).
PAD, IMAGE, VIDEO, VISION_START, VISION_END, FIRST_TEXT = 0, 1, 2, 3, 4, 8

LEADING_TEXT = 3  # text tokens before the first image
MIN_TRAILING_TEXT = 2  # text tokens after the last image, at least

# Qwen-VL: one image is a grid of 6 x 8 patches, merged 2 x 2, so 12 tokens that advance M-RoPE by 4 only.
QWEN_GRID = (1, 6, 8)
QWEN_TOKENS = 12
# LLaVA-OneVision: tiles of 8 x 8 pixels are 2 x 2 patches; anyres cuts the 8 x 16 image into base + 2 tiles.
LLAVA_TILE = 8
LLAVA_IMAGE_SIZE = (8, 16)  # height, width in pixels
LLAVA_ANYRES_TOKENS = 4 + 2 * (4 + 1)  # base tile; two rows of four patches, a newline after each
LLAVA_PLAIN_TOKENS = 4 + 1  # one of several images in a row: no anyres, one newline
# InternVL: 24 x 24 pixels are 6 x 6 patches, shuffled down to 3 x 3.
INTERNVL_IMAGE = 24
INTERNVL_TOKENS = 9


@dataclass(frozen=True)
class Family:
    """One model family: how its tiny model is configured, and which tensors carry its images.

    name: key in FAMILIES; make_config: text settings -> config of the whole model;
    image_format: "", "qwen", "qwen3", "llava" or "internvl" (which tensors hold the images).
    """

    name: str
    make_config: Callable[[dict], object]
    image_format: str = ""

    @property
    def is_vlm(self) -> bool:
        return bool(self.image_format)

    def build(
        self,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        seed: int = 0,
    ) -> PreTrainedModel:
        """The model, cached by these arguments: callers leave it as they found it."""
        return _build(self.name, num_hidden_layers, num_attention_heads, num_key_value_heads, seed)

    def image_tokens(self, images: int) -> int:
        """Number of image tokens that each image takes in a row that holds `images` images."""
        if self.image_format == "llava":
            return LLAVA_ANYRES_TOKENS if images == 1 else LLAVA_PLAIN_TOKENS
        return INTERNVL_TOKENS if self.image_format == "internvl" else QWEN_TOKENS

    def inputs(
        self,
        model: PreTrainedModel,
        lengths: Sequence[int],
        images: Sequence[int] | None = None,
        seed: int = 0,
    ) -> dict[str, torch.Tensor]:
        """Random prompts for `model.forward` and `model.generate`.

        lengths: real tokens of each row, image tokens included (more where the row's images need more);
        images: number of images of each row (None: text only). Rows are padded on the left.
        """
        images = list(images) if images is not None else [0] * len(lengths)
        if len(images) != len(lengths):
            raise ValueError(f"lengths has {len(lengths)} rows, images has {len(images)}")
        if any(images) and not self.is_vlm:
            raise ValueError(f"{self.name} takes no images, got images={images}")
        generator = torch.Generator().manual_seed(seed)
        rows = [self._row(length, count, generator) for length, count in zip(lengths, images, strict=True)]
        width = max(len(row) for row in rows)
        input_ids = torch.full((len(rows), width), PAD)
        attention_mask = torch.zeros_like(input_ids)
        for i, row in enumerate(rows):
            input_ids[i, width - len(row) :] = row
            attention_mask[i, width - len(row) :] = 1
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.image_format.startswith("qwen"):
            inputs["mm_token_type_ids"] = (input_ids == IMAGE).int()
        if any(images):
            inputs |= self._pixels(images, generator)
        return {name: tensor.to(model.device) for name, tensor in inputs.items()}

    def solo(self, inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
        """Row `row` of what `inputs` returned, as a batch of one without padding."""
        real = inputs["attention_mask"][row].bool()
        images = (inputs["input_ids"] == VISION_START).sum(-1)
        first, last = int(images[:row].sum()), int(images[: row + 1].sum())
        solo = {}
        for name, tensor in inputs.items():
            if name in ("input_ids", "attention_mask", "mm_token_type_ids"):
                solo[name] = tensor[row : row + 1, real]
            elif last == first:
                continue  # a text-only row has no image tensors
            elif name == "batch_num_images":
                solo[name] = tensor[row : row + 1]
            else:
                per_image = tensor.shape[0] // int(images.sum())  # Qwen-VL has one row of pixels per patch
                solo[name] = tensor[first * per_image : last * per_image]
        return solo

    def _row(self, length: int, images: int, generator: torch.Generator) -> torch.Tensor:
        """Token ids (length,): text, then each image between start and end marks, then text."""

        # All tokens differ, as far as the vocabulary reaches: equal tokens have keys of equal norm in the first layer,
        # and which of them a method keeps would be decided by rounding.
        order = torch.randperm(VOCAB_SIZE - FIRST_TEXT, generator=generator) + FIRST_TEXT
        unused = iter(order.tolist() * (length // len(order) + 2))

        def text(count: int) -> torch.Tensor:
            return torch.tensor([next(unused) for _ in range(count)], dtype=torch.long)

        if not images:
            return text(length)
        image = torch.tensor([VISION_START, *[IMAGE] * self.image_tokens(images), VISION_END])
        parts = [text(LEADING_TEXT)]
        for _ in range(images):
            parts += [image, text(1)]
        taken = sum(len(part) for part in parts)
        return torch.cat([*parts, text(max(length - taken, MIN_TRAILING_TEXT - 1))])

    def _pixels(self, images: Sequence[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
        """The tensors that the family's processor would make of all the batch's images."""
        count = sum(images)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        if self.image_format == "llava":
            return {
                "pixel_values": noise(count, 3, 3, LLAVA_TILE, LLAVA_TILE),  # image, tile, channel, height, width
                "image_sizes": torch.tensor([LLAVA_IMAGE_SIZE] * count),
                "batch_num_images": torch.tensor(images),
            }
        if self.image_format == "internvl":
            return {"pixel_values": noise(count, 3, INTERNVL_IMAGE, INTERNVL_IMAGE)}
        frames, height, width = QWEN_GRID
        patch = 16 if self.image_format == "qwen3" else 14
        return {
            "pixel_values": noise(count * frames * height * width, 3 * 2 * patch * patch),
            "image_grid_thw": torch.tensor([QWEN_GRID] * count),
        }


@lru_cache(maxsize=32)
def _build(name: str, layers: int, heads: int, kv_heads: int, seed: int) -> PreTrainedModel:
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": heads * HEAD_DIM,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,  # generation always runs to max_new_tokens
        "pad_token_id": PAD,
    }
    config = FAMILIES[name].make_config(text)
    auto = AutoModelForImageTextToText if FAMILIES[name].is_vlm else AutoModelForCausalLM
    with torch.random.fork_rng():
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    _randomize(model, torch.Generator().manual_seed(seed))
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False)


@torch.no_grad()
def _randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Weights under which each layer's output has order 1 and attention is peaked.

    The usual init (std 0.02) makes attention flat, so that dropping any entry hardly changes the logits, and
    a test would not notice that the wrong one was dropped.
    """
    for name, weight in model.named_parameters():
        if "embed_tokens" in name or name.endswith("image_newline"):
            weight.normal_(std=0.25, generator=generator)  # small: else greedy decoding repeats its last token
        elif weight.ndim >= 2:
            weight.normal_(std=weight[0].numel() ** -0.5, generator=generator)
        elif name.endswith("bias"):
            weight.normal_(std=0.1, generator=generator)
        if name.endswith(("q_proj.weight", "q_norm.weight")):
            weight.mul_(3.0)  # attention logits of standard deviation 3
        if name.endswith("k_norm.weight"):
            weight.uniform_(0.5, 1.5, generator=generator)  # with equal weights all keys have one and the same norm
    model.get_output_embeddings().weight[:FIRST_TEXT] = 0  # special tokens are never the most likely


def _qwen2(text: dict) -> Qwen2Config:
    return Qwen2Config(**text)


def _llama(text: dict) -> LlamaConfig:
    return LlamaConfig(**text)


def _llava_onevision(text: dict) -> LlavaOnevisionConfig:
    return LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **text},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": LLAVA_TILE,
            "patch_size": LLAVA_TILE // 2,
            "vision_use_head": False,
        },
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[LLAVA_TILE, 2 * LLAVA_TILE], [2 * LLAVA_TILE, LLAVA_TILE]],
    )


def _qwen_vl_ids() -> dict:
    return {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }


def _mrope(*section: int, **extra: object) -> dict:
    """M-RoPE over HEAD_DIM // 2 frequencies; section: frequencies of time, height, width."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section), **extra}


def _qwen2_vl(text: dict) -> Qwen2VLConfig:
    return Qwen2VLConfig(
        text_config={**text, "rope_parameters": _mrope(2, 3, 3)},
        vision_config={
            "depth": 2,
            "embed_dim": VISION_HIDDEN,
            "hidden_size": text["hidden_size"],
            "num_heads": 2,
            "mlp_ratio": 2,
        },
        **_qwen_vl_ids(),
    )


def _qwen2_5_vl(text: dict) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": _mrope(2, 3, 3)},
        vision_config={
            "depth": 2,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 64,
            "num_heads": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "out_hidden_size": text["hidden_size"],
        },
        **_qwen_vl_ids(),
    )


def _qwen3_vl(text: dict) -> Qwen3VLConfig:
    return Qwen3VLConfig(
        text_config={
            **text,
            "head_dim": HEAD_DIM,
            "rope_parameters": _mrope(3, 3, 2, mrope_interleaved=True),
        },
        vision_config={
            "depth": 3,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **_qwen_vl_ids(),
    )


def _internvl(text: dict) -> InternVLConfig:
    return InternVLConfig(
        text_config={"model_type": "qwen2", **text},
        vision_config={
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [INTERNVL_IMAGE, INTERNVL_IMAGE],
            "patch_size": [4, 4],
        },
        image_token_id=IMAGE,
        image_seq_length=INTERNVL_TOKENS,
        tie_word_embeddings=False,
    )


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen2", _qwen2),
        Family("llama", _llama),
        Family("llava-onevision", _llava_onevision, "llava"),
        Family("qwen2-vl", _qwen2_vl, "qwen"),
        Family("qwen2.5-vl", _qwen2_5_vl, "qwen"),
        Family("qwen3-vl", _qwen3_vl, "qwen3"),
        Family("internvl", _internvl, "internvl"),
    )
}
VLM_FAMILIES: dict[str, Family] = {name: family for name, family in FAMILIES.items() if family.is_vlm}
