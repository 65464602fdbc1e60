"""Tiny random models of the supported families, and inputs for them, without hub, tokenizer or processor.

family = FAMILIES["qwen2-vl"]
model = family.build()                                         # fp32, eval, the same weights at each call
inputs = family.inputs(model, lengths=[17, 30], images=[1, 0])  # left-padded, as from a processor
model.generate(**inputs)
model(**family.solo(inputs, row=0))                            # row 0 alone, without its padding

The property tests draw from FAMILIES. MORE_FAMILIES have the same interface and their own tests
(tests/test_family_table.py), for those of LISTED_FAMILIES that the installed transformers has."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.support import llava_next_layout

HEAD_DIM = 16
VOCAB_SIZE = 128
VISION_HIDDEN = 32
# Ids below FIRST_TEXT are special. Greedy decoding never picks them: their logits are zero (see randomize).
PAD, IMAGE, VIDEO, VISION_START, VISION_END, LINE_BREAK, UNUSED, FIRST_TEXT = 0, 1, 2, 3, 4, 5, 6, 8

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
# The families below see images of 8 x 8 pixels in patches of 4 x 4 (or 2 x 2, merged 2 x 2 by the model): 4 tokens.
SMALL_IMAGE = 8
SMALL_TOKENS = 4
# Idefics3 and SmolVLM: 16 x 16 pixels are 4 x 4 patches, shuffled down to 2 x 2.
IDEFICS_IMAGE = 16
# MiniCPM-V: 8 x 8 patches of 4 x 4 pixels in one row, merged twice 2 x 2.
MINICPM_GRID = (8, 8)
MINICPM_PATCH = 4
# Qwen2-Audio: a recording of 16 mel frames becomes 8, then 4 tokens.
MEL_BINS = 8
MEL_FRAMES = 16
AUDIO_TOKENS = 4
FRAMES = 4  # of every video

TOKENS_PER_IMAGE = {
    "qwen": QWEN_TOKENS,
    "qwen3": QWEN_TOKENS,
    "qwen3-omni": QWEN_TOKENS,
    "glm4v": QWEN_TOKENS,
    "internvl": INTERNVL_TOKENS,
    "llava-next": LLAVA_ANYRES_TOKENS,
    "small": SMALL_TOKENS,
    "pixtral": SMALL_TOKENS,
    "mistral3": SMALL_TOKENS,
    "gemma3": SMALL_TOKENS,
    "gemma4": SMALL_TOKENS,
    "molmo2": SMALL_TOKENS,
    "idefics": SMALL_TOKENS,
    "minicpm": SMALL_TOKENS,
    "mllama": 1,  # cross-attention sees the image; the decoder sees a mark
    "audio": AUDIO_TOKENS,
}

STAMPED = {  # a video's frame, with UNUSED for its time stamp; some have the tokens of an image
    "qwen3": [UNUSED, VISION_START, *[VIDEO] * 4],
    "glm4v": [VISION_START, *[IMAGE] * 4, VISION_END, UNUSED],
    "gemma4": [UNUSED, VISION_START, *[VIDEO] * SMALL_TOKENS, VISION_END],
    "molmo2": [UNUSED, VISION_START, *[IMAGE] * SMALL_TOKENS, VISION_END],
}
TYPED = ("qwen", "qwen3", "glm4v", "gemma4", "molmo2")  # formats whose inputs say which tokens are an image's


@dataclass(frozen=True)
class Family:
    """One model family: how its tiny model is configured, and which tensors carry its images.

    name: key in FAMILIES or MORE_FAMILIES; make_config: text settings -> config of the whole model;
    image_format: which tensors hold the images (recordings for "audio"): "" or "llava" or a key of TOKENS_PER_IMAGE;
    layers: of the decoder, unless `build` is asked for another number; video: whether it takes videos;
    needs: a class that not every supported transformers has; rounding: how far logits of a row alone may be from those
    in a padded batch.
    """

    name: str
    make_config: Callable[[dict], object]
    image_format: str = ""
    layers: int = 3
    video: bool = False
    needs: str = "PreTrainedModel"
    rounding: float = 1e-4

    @property
    def is_vlm(self) -> bool:
        return bool(self.image_format)

    def build(
        self,
        num_hidden_layers: int | None = None,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        seed: int = 0,
    ) -> PreTrainedModel:
        """Return the model, cached by these arguments: callers must leave it unchanged."""
        layers = self.layers if num_hidden_layers is None else num_hidden_layers
        return _build(self.name, layers, num_attention_heads, num_key_value_heads, seed)

    def image_tokens(self, images: int) -> int:
        """Return the number of image tokens per image in a row with `images` images."""
        if self.image_format == "llava":
            return LLAVA_ANYRES_TOKENS if images == 1 else LLAVA_PLAIN_TOKENS
        return TOKENS_PER_IMAGE[self.image_format]

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
        if self.image_format in TYPED:
            inputs["mm_token_type_ids"] = (input_ids == IMAGE).int()
        if self.image_format == "gemma3":
            inputs["token_type_ids"] = (input_ids == IMAGE).long()
        if any(images):
            inputs |= self._pixels(images, generator)
        if self.image_format == "mllama" and any(images):
            inputs["cross_attention_mask"] = _cross_attention_mask(input_ids, attention_mask, max(images))
        return {name: tensor.to(model.device) for name, tensor in inputs.items()}

    def video_inputs(self) -> dict[str, torch.Tensor]:
        """Return one prompt with a video of FRAMES frames between text."""
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(VOCAB_SIZE - FIRST_TEXT, generator=torch.Generator().manual_seed(1))
        words = (order[:20] + FIRST_TEXT).tolist()
        patch = 16 if self.image_format.startswith("qwen3") else 14
        pixels, size = (FRAMES * 16, 3 * 2 * patch * patch), {"video_grid_thw": torch.tensor([[FRAMES, 4, 4]])}
        if self.image_format in STAMPED:
            stamps, frame = words[6 : 6 + FRAMES], STAMPED[self.image_format]
            video = [stamp if token == UNUSED else token for stamp in stamps for token in frame]
            after = words[6 + FRAMES :]
        elif self.image_format in ("qwen", "qwen3-omni"):
            video, after = [VISION_START, *[VIDEO] * (4 * FRAMES)], words[6:]
            if self.image_format == "qwen3-omni":
                video, size = [*video, VISION_END], size | {"video_second_per_grid": torch.ones(1)}
        elif self.image_format == "minicpm":
            video, after = [VIDEO] * (SMALL_TOKENS * FRAMES), words[6:]
            height, width = MINICPM_GRID
            pixels = (1, 3, MINICPM_PATCH, FRAMES * height * width * MINICPM_PATCH)
            size = {"target_sizes_videos": torch.tensor([MINICPM_GRID] * FRAMES)}
        else:  # LLaVA: one token per frame after pooling; LLaVA-OneVision puts a newline after the last
            video, after = [VIDEO] * (FRAMES + int(self.image_format == "llava")), words[6:]
            pixels, size = (1, FRAMES, 3, LLAVA_TILE, LLAVA_TILE), {}
        ids = torch.tensor([[*words[:6], *video, *after]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.image_format in TYPED:
            kind = 1 if self.image_format == "molmo2" else 2
            inputs["mm_token_type_ids"] = kind * ((ids == IMAGE) | (ids == VIDEO)).int()
        if self.image_format in ("gemma4", "molmo2"):
            return inputs | self._patches(FRAMES, generator, is_video=True)
        return inputs | {"pixel_values_videos": torch.randn(pixels, generator=generator)} | size

    def solo(self, inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
        """Return row `row` of the result of `inputs` as a batch of one without padding."""
        real = inputs["attention_mask"][row].bool()
        images = (inputs["input_ids"] == VISION_START).sum(-1)
        first, last = int(images[:row].sum()), int(images[: row + 1].sum())
        solo = {}
        for name, tensor in inputs.items():
            if name in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "cross_attention_mask"):
                solo[name] = tensor[row : row + 1, real]
            elif self.image_format == "mllama":  # a row without images attends to empty ones, as in its batch
                solo[name] = tensor[row : row + 1]
            elif last == first:
                continue  # a text-only row has no image tensors
            elif name == "batch_num_images":
                solo[name] = tensor[row : row + 1]
            elif self.image_format == "idefics":
                solo[name] = tensor[row : row + 1, : last - first]
            elif self.image_format == "minicpm" and name == "pixel_values":  # all patches are in one row
                per_image = tensor.shape[-1] // int(images.sum())
                solo[name] = tensor[..., first * per_image : last * per_image]
            else:
                per_image = tensor.shape[0] // int(images.sum())  # Qwen-VL has one row of pixels per patch
                solo[name] = tensor[first * per_image : last * per_image]
                if name == "image_token_pooling":  # says which of the batch's patches
                    solo[name] = solo[name] - solo[name].min()
        return solo

    def _row(self, length: int, images: int, generator: torch.Generator) -> torch.Tensor:
        """Return token ids (length,): text, then each image between start and end marks, then text."""

        # All tokens differ, as far as the vocabulary reaches: equal tokens have keys of equal norm in the first layer,
        # and which of them a method keeps would be decided by rounding.
        order = torch.randperm(VOCAB_SIZE - FIRST_TEXT, generator=generator) + FIRST_TEXT
        unused = iter(order.tolist() * (length // len(order) + 2))

        def text(count: int) -> torch.Tensor:
            return torch.tensor([next(unused) for _ in range(count)], dtype=torch.long)

        if not images:
            return text(length)
        image = torch.tensor([VISION_START, *self._image(images), VISION_END])
        parts = [text(LEADING_TEXT)]
        for _ in range(images):
            parts += [image, text(1)]
        taken = sum(len(part) for part in parts)
        return torch.cat([*parts, text(max(length - taken, MIN_TRAILING_TEXT - 1))])

    def _image(self, images: int) -> list[int]:
        """Return token ids of one of a row's `images` images, without its marks."""
        if self.image_format in ("pixtral", "mistral3"):  # two lines
            return [IMAGE, IMAGE, LINE_BREAK, IMAGE, IMAGE]
        return [IMAGE] * self.image_tokens(images)

    def _pixels(self, images: Sequence[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return the tensors that the family's processor would create for all the batch's images."""
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
        if self.image_format in ("small", "gemma3"):
            return {"pixel_values": noise(count, 3, SMALL_IMAGE, SMALL_IMAGE)}
        if self.image_format in ("pixtral", "mistral3"):
            side = SMALL_IMAGE if self.image_format == "pixtral" else 2 * SMALL_IMAGE  # merged 2 x 2
            return {"pixel_values": noise(count, 3, side, side), "image_sizes": torch.tensor([[side, side]] * count)}
        if self.image_format in ("gemma4", "molmo2"):
            return self._patches(count, generator)
        if self.image_format == "llava-next":
            sizes = torch.tensor([LLAVA_IMAGE_SIZE] * count)
            return {"pixel_values": noise(count, 3, 3, LLAVA_TILE, LLAVA_TILE), "image_sizes": sizes}
        if self.image_format == "idefics":  # rows with fewer images are filled up with zeros
            shown = torch.arange(max(images)) < torch.tensor(images)[:, None]
            pixels = noise(len(images), max(images), 3, IDEFICS_IMAGE, IDEFICS_IMAGE)
            return {"pixel_values": pixels * shown[:, :, None, None, None]}
        if self.image_format == "minicpm":
            height, width = MINICPM_GRID
            pixels = noise(1, 3, MINICPM_PATCH, count * height * width * MINICPM_PATCH)
            return {"pixel_values": pixels, "target_sizes": torch.tensor([MINICPM_GRID] * count)}
        if self.image_format == "audio":
            mask = torch.ones(count, MEL_FRAMES, dtype=torch.long)
            return {"input_features": noise(count, MEL_BINS, MEL_FRAMES), "feature_attention_mask": mask}
        if self.image_format == "mllama":  # one tile per image; 0 is the aspect ratio of no image
            shown = torch.arange(max(images)) < torch.tensor(images)[:, None]
            pixels = noise(len(images), max(images), 1, 3, SMALL_IMAGE, SMALL_IMAGE)
            return {
                "pixel_values": pixels * shown[:, :, None, None, None, None],
                "aspect_ratio_ids": shown.long(),
                "aspect_ratio_mask": shown.long()[..., None],
            }
        frames, height, width = QWEN_GRID
        patch = 16 if self.image_format.startswith("qwen3") else 14
        return {
            "pixel_values": noise(count * frames * height * width, 3 * 2 * patch * patch),
            "image_grid_thw": torch.tensor([QWEN_GRID] * count),
        }

    def _patches(self, count: int, generator: torch.Generator, is_video: bool = False) -> dict[str, torch.Tensor]:
        """Return `count` images, or one video of as many frames, of 4 x 4 patches that are pooled 2 x 2."""
        pixels = torch.randn(count, 16, 3 * (SMALL_IMAGE // 4) ** 2, generator=generator)
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)  # (x, y)
        if self.image_format == "gemma4":
            places = places.expand(count, -1, -1)
            if not is_video:
                return {"pixel_values": pixels, "image_position_ids": places}
            forward = transformers.Gemma4ForConditionalGeneration.forward
            if "num_frames_per_video" in inspect.signature(forward).parameters:
                frames = torch.tensor([count])
                return {"pixel_values_videos": pixels, "video_position_ids": places, "num_frames_per_video": frames}
            return {"pixel_values_videos": pixels[None], "video_position_ids": places[None]}
        patches = torch.arange(count * 16).view(count, 2, 2, 2, 2)  # image, rows, row in the pool, columns, column
        pools = patches.transpose(2, 3).reshape(count * SMALL_TOKENS, 4)
        if is_video:
            grids = torch.tensor([[count, 2, 2]])
            return {"pixel_values_videos": pixels, "video_token_pooling": pools, "video_grids": grids}
        grids = torch.tensor([[2, 2, 0, 0]] * count)
        return {"pixel_values": pixels, "image_token_pooling": pools, "image_grids": grids}


def _cross_attention_mask(input_ids: torch.Tensor, attention_mask: torch.Tensor, images: int) -> torch.Tensor:
    """Return Mllama's mask (batch, columns, images, 1 tile): a token sees the images whose marks it follows or is."""
    seen = (input_ids == IMAGE).cumsum(1)[..., None] > torch.arange(images)
    return (seen & attention_mask[..., None].bool()).long()[..., None]


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
    family = (FAMILIES | MORE_FAMILIES)[name]
    config = family.make_config(text)
    make = AutoModelForImageTextToText.from_config if family.is_vlm else AutoModelForCausalLM.from_config
    if family.image_format == "audio":  # no automatic class for it is in every supported transformers
        make = transformers.Qwen2AudioForConditionalGeneration._from_config
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # `randomize` leaves some of the model's own weights, such as CLIP's class embedding
        model = make(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    randomize(model, torch.Generator().manual_seed(seed))
    if name == "llava-onevision-original":  # through the files of a checkpoint: LLaVA-OneVision's own weights again
        words = Tokenizer(WordLevel({"<pad>": PAD, "<image>": IMAGE, "<video>": VIDEO}, unk_token="<pad>"))
        model = llava_next_layout.reloaded(model, PreTrainedTokenizerFast(tokenizer_object=words))
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False)


@torch.no_grad()
def randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Set weights under which each layer's output has order 1 and attention is peaked.

    The usual init (std 0.02) makes attention flat, so dropping any entry hardly changes the logits, and a test would
    not notice that the wrong one was dropped."""
    for name, weight in model.named_parameters():
        if "embed_tokens" in name or name.endswith("image_newline"):
            weight.normal_(std=0.25, generator=generator)  # small: else greedy decoding repeats its last token
        elif weight.ndim >= 2:
            weight.normal_(std=weight[0].numel() ** -0.5, generator=generator)
        elif name.endswith("bias"):
            weight.normal_(std=0.1, generator=generator)
        elif name.endswith("gate"):
            weight.fill_(0.7)  # Mllama starts with closed gates: no image would be seen
        if name.endswith(("q_proj.weight", "q_norm.weight")):
            weight.mul_(3.0)  # attention logits of standard deviation 3
        if name.endswith("k_norm.weight"):
            weight.uniform_(0.5, 1.5, generator=generator)  # with equal weights all keys have one and the same norm
    model.get_output_embeddings().weight[:FIRST_TEXT] = 0  # special tokens are never the most likely


TOWER = {"hidden_size": VISION_HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
# Of 8 x 8 pixels it makes 2 x 2 patches.
SMALL_TOWER = {**TOWER, "image_size": SMALL_IMAGE, "patch_size": SMALL_IMAGE // 2}
POOLED_TOWER = {**TOWER, "num_key_value_heads": 2, "head_dim": 16, "patch_size": SMALL_IMAGE // 4}
QWEN_TOWER = {"depth": 2, "hidden_size": VISION_HIDDEN, "intermediate_size": 64, "num_heads": 2}
DEEPSTACK_TOWER = {**QWEN_TOWER, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
AUDIO_TOWER = {
    "num_mel_bins": MEL_BINS, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "d_model": VISION_HIDDEN,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CLIP = {"model_type": "clip_vision_model", **SMALL_TOWER}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
QWEN_IDS = {**IDS, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
TILES = [[LLAVA_TILE, 2 * LLAVA_TILE], [2 * LLAVA_TILE, LLAVA_TILE]]
UNBOUNDED_MISTRAL = {"model_type": "mistral", "sliding_window": None}


def _every_other(kind: str, text: dict) -> list[str]:
    """Layer types: `kind` in turn with full attention."""
    return [(kind, "full_attention")[i % 2] for i in range(text["num_hidden_layers"])]


def _mrope(*section: int, **extra: object) -> dict:
    """M-RoPE over HEAD_DIM // 2 frequencies; `section` holds the frequencies of time, height and width."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section), **extra}


def _llava_onevision(text: dict) -> PreTrainedConfig:
    sizes = {"image_size": LLAVA_TILE, "patch_size": LLAVA_TILE // 2}
    return transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **text},
        vision_config={"model_type": "siglip_vision_model", **TOWER, **sizes, "vision_use_head": False},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=TILES,
    )


def _qwen2_vl(text: dict) -> PreTrainedConfig:
    tower = {"depth": 2, "embed_dim": VISION_HIDDEN, "num_heads": 2, "mlp_ratio": 2}
    return transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": _mrope(2, 3, 3)},
        vision_config={**tower, "hidden_size": text["hidden_size"]},
        **QWEN_IDS,
    )


def _qwen2_5_vl(text: dict) -> PreTrainedConfig:
    windows = {"window_size": 56, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": _mrope(2, 3, 3)},
        vision_config={**QWEN_TOWER, **windows, "out_hidden_size": text["hidden_size"]},
        **QWEN_IDS,
    )


def _qwen3_text(text: dict) -> dict:
    return {**text, "head_dim": HEAD_DIM, "rope_parameters": _mrope(3, 3, 2, mrope_interleaved=True)}


def _qwen3_vl(text: dict) -> PreTrainedConfig:
    return transformers.Qwen3VLConfig(
        text_config=_qwen3_text(text),
        vision_config={**DEEPSTACK_TOWER, "out_hidden_size": text["hidden_size"]},
        **QWEN_IDS,
    )


def _internvl(text: dict) -> PreTrainedConfig:
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **text},
        vision_config={**TOWER, "image_size": [INTERNVL_IMAGE, INTERNVL_IMAGE], "patch_size": [4, 4]},
        image_token_id=IMAGE,
        image_seq_length=INTERNVL_TOKENS,
        tie_word_embeddings=False,
    )


def _llava(text: dict) -> PreTrainedConfig:
    return transformers.LlavaConfig(
        text_config={"model_type": "llama", **text},
        vision_config=CLIP,
        image_token_index=IMAGE,
        image_seq_length=SMALL_TOKENS,
    )


def _llava_next(text: dict) -> PreTrainedConfig:
    return transformers.LlavaNextConfig(
        text_config={**UNBOUNDED_MISTRAL, **text},
        vision_config=CLIP,
        image_token_index=IMAGE,
        image_grid_pinpoints=TILES,
    )


def _llava_next_video(text: dict) -> PreTrainedConfig:
    return transformers.LlavaNextVideoConfig(
        text_config={"model_type": "llama", **text},
        vision_config=CLIP,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=TILES,
    )


def _qwen3_vl_moe(text: dict) -> PreTrainedConfig:
    dense = _qwen3_vl(text).to_dict()
    skip = ("model_type", "architectures", "dtype")
    text_config, vision_config = (
        {name: value for name, value in dense[part].items() if name not in skip}
        for part in ("text_config", "vision_config")
    )
    text_config |= {**EXPERTS, "tie_word_embeddings": False}
    return transformers.Qwen3VLMoeConfig(text_config=text_config, vision_config=vision_config, **QWEN_IDS)


def _idefics(config: type, text: dict) -> PreTrainedConfig:
    return config(
        text_config={"model_type": "llama", **text},
        vision_config={**TOWER, "image_size": IDEFICS_IMAGE, "patch_size": IDEFICS_IMAGE // 4},
        image_token_id=IMAGE,
        scale_factor=2,
    )


def _gemma3(text: dict) -> PreTrainedConfig:
    """Every other layer only sees the last 12 tokens."""
    heads = {"head_dim": HEAD_DIM, "query_pre_attn_scalar": HEAD_DIM}
    layers = {"sliding_window": 12, "layer_types": _every_other("sliding_attention", text)}
    return transformers.Gemma3Config(
        text_config={**text, **heads, **layers},
        vision_config={"model_type": "siglip_vision_model", **SMALL_TOWER, "vision_use_head": False},
        mm_tokens_per_image=SMALL_TOKENS,
        image_token_index=IMAGE,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
        tie_word_embeddings=False,
    )


def _mllama(text: dict) -> PreTrainedConfig:
    """Layer 1 attends to the images, the others to the text."""
    return transformers.MllamaConfig(
        text_config={**text, "bos_token_id": PAD, "cross_attention_layers": [1]},
        vision_config={
            **{name: size for name, size in SMALL_TOWER.items() if name != "num_attention_heads"},
            "attention_heads": 2,
            "num_global_layers": 1,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 2 * VISION_HIDDEN,
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
        },
        image_token_index=IMAGE,
    )


def _minicpm_v(text: dict) -> PreTrainedConfig:
    """The language model is Qwen3.5: every other layer here is a linear attention, which has no keys to evict."""
    side = MINICPM_PATCH * MINICPM_GRID[0]
    return transformers.MiniCPMV4_6Config(
        text_config=_qwen3_5_text(text),
        vision_config={**TOWER, "image_size": side, "patch_size": MINICPM_PATCH},
        insert_layer_id=0,
        image_size=side,
        **IDS,
    )


def _qwen3_5(text: dict) -> PreTrainedConfig:
    """Every other layer is a linear attention (a gated delta net)."""
    tower = {**QWEN_TOWER, "out_hidden_size": text["hidden_size"], "num_position_embeddings": 64}
    return transformers.Qwen3_5Config(text_config=_qwen3_5_text(text), vision_config=tower, **QWEN_IDS)


def _qwen3_5_text(text: dict) -> dict:
    return {
        "model_type": "qwen3_5_text",
        **text,
        "head_dim": HEAD_DIM,
        "layer_types": _every_other("linear_attention", text),
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": _mrope(2, 1, 1, partial_rotary_factor=0.5),
    }


def _glm4v(text: dict) -> PreTrainedConfig:
    """Rotates neighbouring channels, and only half of them."""
    return transformers.Glm4vConfig(
        text_config={**text, "rope_parameters": _mrope(2, 1, 1, partial_rotary_factor=0.5)},
        vision_config={**QWEN_TOWER, "image_size": 112, "out_hidden_size": text["hidden_size"]},
        image_start_token_id=VISION_START,
        image_end_token_id=VISION_END,
        **IDS,
    )


def _pixtral(text: dict) -> PreTrainedConfig:
    return transformers.LlavaConfig(**_of_pixtral(text), vision_feature_layer=-1, vision_feature_select_strategy="full")


def _mistral3(text: dict) -> PreTrainedConfig:
    return transformers.Mistral3Config(**_of_pixtral(text), spatial_merge_size=2, tie_word_embeddings=False)


def _of_pixtral(text: dict) -> dict:
    return {
        "text_config": {**UNBOUNDED_MISTRAL, **text, "head_dim": HEAD_DIM},
        "vision_config": {"model_type": "pixtral", **SMALL_TOWER, "image_size": 2 * SMALL_IMAGE},
        "image_token_index": IMAGE,
    }


def _gemma4(text: dict, **more: object) -> PreTrainedConfig:
    """Every other layer only sees the last 12 tokens.

    The others have longer and fewer KV heads, whose values are their keys before rotation. Each layer has its own
    embeddings."""
    return transformers.Gemma4Config(
        text_config={
            **text,
            "head_dim": HEAD_DIM,
            "global_head_dim": 2 * HEAD_DIM,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "sliding_window": 12,
            "layer_types": _every_other("sliding_attention", text),
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "use_bidirectional_attention": "vision",
            **more,
        },
        vision_config={**POOLED_TOWER, "pooling_kernel_size": 2, "position_embedding_size": 16},
        audio_config=None,
        audio_token_id=UNUSED,
        boi_token_id=VISION_START,
        eoi_token_id=VISION_END,
        tie_word_embeddings=False,
        **IDS,
    )


def _gemma4_e2b(text: dict) -> PreTrainedConfig:
    """The last two layers have no keys of their own, and images are seen causally."""
    return _gemma4(text, num_kv_shared_layers=2, use_bidirectional_attention=None, attention_k_eq_v=False)


def _molmo2(text: dict) -> PreTrainedConfig:
    """Vision tokens, of one image or several, attend to each other in both directions."""
    heads = {name: POOLED_TOWER[name] for name in POOLED_TOWER if name not in ("num_hidden_layers", "patch_size")}
    return transformers.Molmo2Config(
        text_config={**text, "head_dim": HEAD_DIM, "additional_vocab_size": 0},
        vision_config={**POOLED_TOWER, "image_size": [SMALL_IMAGE, SMALL_IMAGE]},
        adapter_config={"vision_feature_layer": [-1, 0], **heads, "text_hidden_size": text["hidden_size"]},
        image_patch_id=IMAGE,
        image_start_token_id=VISION_START,
        image_end_token_id=VISION_END,
    )


def _qwen3_omni(text: dict) -> PreTrainedConfig:
    """The thinker, which generates the text."""
    sound = {"output_dim": text["hidden_size"], "max_source_positions": 100, "downsample_hidden_size": 16}
    return transformers.Qwen3OmniMoeThinkerConfig(
        text_config={**_qwen3_text(text), **EXPERTS},
        vision_config={**DEEPSTACK_TOWER, "out_hidden_size": text["hidden_size"]},
        audio_config={**AUDIO_TOWER, **sound},
        audio_token_id=UNUSED,
        audio_start_token_id=UNUSED + 1,
        **QWEN_IDS,
    )


def _qwen2_audio(text: dict) -> PreTrainedConfig:
    sound = {"model_type": "qwen2_audio_encoder", "max_source_positions": MEL_FRAMES // 2}
    return transformers.Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **text}, audio_config={**AUDIO_TOWER, **sound}, audio_token_index=IMAGE
    )


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen2", lambda text: transformers.Qwen2Config(**text)),
        Family("llama", lambda text: transformers.LlamaConfig(**text)),
        Family("llava-onevision", _llava_onevision, "llava", video=True),
        Family("qwen2-vl", _qwen2_vl, "qwen", video=True),
        Family("qwen2.5-vl", _qwen2_5_vl, "qwen", video=True),
        Family("qwen3-vl", _qwen3_vl, "qwen3", video=True),
        Family("internvl", _internvl, "internvl"),
    )
}
SOME_FAMILIES = ["qwen2", "llava-onevision", "qwen2.5-vl"]  # text only, plain positions, M-RoPE
LISTED_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen3", lambda text: transformers.Qwen3Config(**text, head_dim=HEAD_DIM)),
        # As from version 0.2 on.
        Family("mistral", lambda text: transformers.MistralConfig(**text, sliding_window=None)),
        Family("llava-1.5", _llava, "small"),
        Family("llava-onevision-original", _llava_onevision, "llava", video=True),
        Family("llava-next", _llava_next, "llava-next"),
        Family("llava-next-video", _llava_next_video, "llava-next", video=True),
        Family("qwen3-vl-moe", _qwen3_vl_moe, "qwen3", video=True),
        Family("smolvlm", partial(_idefics, transformers.SmolVLMConfig), "idefics"),
        Family("idefics3", partial(_idefics, transformers.Idefics3Config), "idefics"),
        Family("gemma3", _gemma3, "gemma3", layers=4),
        Family("mllama", _mllama, "mllama", layers=4),
        Family("minicpm-v", _minicpm_v, "minicpm", layers=4, video=True),
        # Its linear attention solves a system of equations per chunk, and padding shifts the chunks.
        Family("qwen3.5", _qwen3_5, "qwen3", layers=4, video=True, rounding=1e-3),
        Family("glm4v", _glm4v, "glm4v", video=True),
        Family("pixtral", _pixtral, "pixtral"),
        Family("mistral3", _mistral3, "mistral3"),
        Family("gemma4", _gemma4, "gemma4", layers=4, video=True),
        Family("gemma4-e2b", _gemma4_e2b, "gemma4", layers=6, video=True),
        Family("molmo2", _molmo2, "molmo2", video=True, needs="Molmo2Config"),
        Family("qwen3-omni", _qwen3_omni, "qwen3-omni", video=True),
        Family("qwen2-audio", _qwen2_audio, "audio"),
    )
}
MORE_FAMILIES = {name: family for name, family in LISTED_FAMILIES.items() if hasattr(transformers, family.needs)}
VLM_FAMILIES: dict[str, Family] = {name: family for name, family in FAMILIES.items() if family.is_vlm}


def sliding_model(*layer_types: str) -> PreTrainedModel:
    """Return a Qwen2 whose layers see all tokens ("full") or the last 12 ("sliding")."""
    config = copy.deepcopy(FAMILIES["qwen2"].build(len(layer_types)).config)
    config.use_sliding_window, config.sliding_window = True, 12
    config.layer_types = [f"{kind}_attention" for kind in layer_types]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.Qwen2ForCausalLM(config).eval()
