"""Tiny models with random weights, and prompts for them: no hub, no tokenizer, no processor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlavaOnevisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2VLConfig,
)

VOCABULARY = 128
PAD, IMAGE, VIDEO, VISION_START, VISION_END, FIRST_TEXT = 0, 1, 2, 3, 4, 8  # greedy decoding picks no id below 8
FRAME = (6, 8)  # patches of a Qwen2-VL picture, or of two frames of a video; 2 x 2 patches make a token
FRAMES = 5  # of every video, if two of Qwen2-VL's count as one
TILE = 16  # pixels of a LLaVA-OneVision tile, 4 x 4 patches; a picture is scaled down to a tile, and cut into two
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,  # answers run to their full length
    "pad_token_id": PAD,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
PER_TOKEN = ("input_ids", "attention_mask", "mm_token_type_ids")  # inputs (batch, tokens), which pads fill up


@dataclass(frozen=True)
class Tried:
    """A model and a left-padded batch of prompts for it.

    Attributes:
        name: the model's family.
        rows: each prompt's inputs, without pads.
        shown: number of pictures, or of videos, in each row.
    """

    name: str
    model: PreTrainedModel
    rows: list[dict[str, torch.Tensor]]
    shown: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return [row["input_ids"].shape[1] for row in self.rows]

    @cached_property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The rows as one batch."""
        width, together = max(self.lengths), {}
        for name in dict.fromkeys(name for row in self.rows for name in row):
            parts = [row[name] for row in self.rows if name in row]
            if name in PER_TOKEN:
                parts = [F.pad(part, (width - part.shape[1], 0), value=PAD) for part in parts]
            together[name] = torch.cat(parts)
        return together

    def __str__(self) -> str:
        kind = "videos" if "pixel_values_videos" in self.inputs else "pictures"
        seen = f", {kind}: {', '.join(map(str, self.shown))}" if any(self.shown) else ""
        return f"{self.name}, {' and '.join(map(str, self.lengths))} tokens{seen}"

    def alone(self, row: int) -> "Tried":
        """Return one row without its pads."""
        return Tried(self.name, self.model, self.rows[row : row + 1], self.shown[row : row + 1])


Shown = tuple[list[int], dict[str, torch.Tensor]]  # a picture's or video's tokens, and the model's inputs for it


def picture(generator: torch.Generator) -> Shown:
    """Draw a picture for Qwen2-VL, of 12 tokens."""
    pixels = torch.randn(FRAME[0] * FRAME[1], 3 * 2 * 14 * 14, generator=generator)
    return [IMAGE] * (len(pixels) // 4), {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, *FRAME]])}


def video(generator: torch.Generator) -> Shown:
    """Draw a video for Qwen2-VL, of 12 tokens per frame."""
    pixels = torch.randn(FRAMES * FRAME[0] * FRAME[1], 3 * 2 * 14 * 14, generator=generator)
    grid = torch.tensor([[FRAMES, *FRAME]])
    return [VIDEO] * (len(pixels) // 4), {"pixel_values_videos": pixels, "video_grid_thw": grid}


def tiled_picture(generator: torch.Generator) -> Shown:
    """Draw the only picture of a prompt for LLaVA-OneVision: 16 tokens of the whole, and 4 lines of both tiles."""
    pixels, size = torch.randn(1, 3, 3, TILE, TILE, generator=generator), torch.tensor([[TILE, 2 * TILE]])
    return [IMAGE] * (16 + 4 * (8 + 1)), {"pixel_values": pixels, "image_sizes": size}


def tiled_video(generator: torch.Generator) -> Shown:
    """Draw a video for LLaVA-OneVision, of 4 tokens per frame and one behind the last."""
    return [VIDEO] * (4 * FRAMES + 1), {
        "pixel_values_videos": torch.randn(1, FRAMES, 3, TILE, TILE, generator=generator)
    }


def text_model() -> PreTrainedModel:
    """Build a tiny Qwen2."""
    return _built(AutoModelForCausalLM, Qwen2Config(**TEXT))


def vision_model(layers: int = 3) -> PreTrainedModel:
    """Build a tiny Qwen2-VL, with M-RoPE and a vision tower."""
    config = Qwen2VLConfig(
        text_config={**TEXT, "num_hidden_layers": layers, "rope_parameters": MROPE},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return _built(AutoModelForImageTextToText, config)


def tiled_model(layers: int = 3) -> PreTrainedModel:
    """Build a tiny LLaVA-OneVision, whose vision tower's attention can be read."""
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"image_size": TILE, "patch_size": TILE // 4, "vision_use_head": False}
    config = LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2", "num_hidden_layers": layers},
        vision_config={"model_type": "siglip_vision_model", **tower, **sizes},
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[TILE, 2 * TILE]],
    )
    return _built(AutoModelForImageTextToText, config)


def prompts(
    name: str,
    model: PreTrainedModel,
    lengths: Sequence[int],
    shown: Sequence[int],
    seed: int,
    show: Callable[[torch.Generator], Shown] = picture,
) -> Tried:
    """Create prompts with random words, and in each row so many pictures or videos that `show` draws.

    `lengths` count their tokens, too."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length, count in zip(lengths, shown, strict=True):
        words = torch.randperm(VOCABULARY - FIRST_TEXT, generator=generator) + FIRST_TEXT
        drawn = [show(generator) for _ in range(count)]
        seen = [token for tokens, _ in drawn for token in (VISION_START, *tokens, VISION_END)]
        text = words.repeat(length // len(words) + 1)[: length - len(seen)]
        ids = torch.cat([text[:3], torch.tensor(seen, dtype=torch.long), text[3:]])[None]
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if model.config.model_type == "qwen2_vl":
            row["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        if drawn:
            row |= {each: torch.cat([inputs[each] for _, inputs in drawn]) for each in drawn[0][1]}
        rows.append(row)
    return Tried(name, model, rows, tuple(shown))


@torch.no_grad()
def _built(auto: type, config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model with peaked attention; if attention is flat, hardly anything depends on which entries are kept."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                weight.normal_(std=0.25)
            elif weight.ndim >= 2:
                weight.normal_(std=weight[0].numel() ** -0.5 * (3 if name.endswith("q_proj.weight") else 1))
            elif name.endswith("bias"):
                weight.normal_(std=0.1)
    model.get_output_embeddings().weight[:FIRST_TEXT] = 0
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    return model.requires_grad_(False)
