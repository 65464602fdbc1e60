"""Tiny models with random weights, and prompts for them: no hub, no tokenizer, no processor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, Qwen2Config, Qwen2VLConfig

VOCABULARY = 128
PAD, IMAGE, VIDEO, VISION_START, VISION_END, FIRST_TEXT = 0, 1, 2, 3, 4, 8  # greedy decoding picks no id below 8
GRID = (1, 6, 8)  # patches of an image; 2 x 2 patches make a token
IMAGE_TOKENS = 12
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


@dataclass(frozen=True)
class Tried:
    """A model and a left-padded batch of prompts for it.

    Attributes:
        name: the model's family.
        images: number of pictures in each row.
    """

    name: str
    model: PreTrainedModel
    inputs: dict[str, torch.Tensor]
    images: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return self.inputs["attention_mask"].sum(1).tolist()

    def __str__(self) -> str:
        seen = ", a picture in the first" if sum(self.images) else ""
        return f"{self.name}, {' and '.join(map(str, self.lengths))} tokens{seen}"

    def alone(self, row: int) -> "Tried":
        """Return one row without its pads."""
        real = self.inputs["attention_mask"][row].bool()
        inputs = {}
        for name, tensor in self.inputs.items():
            if len(tensor) == len(real) or tensor.shape[-1] == len(real):
                inputs[name] = tensor[row : row + 1, real]
            elif self.images[row]:  # all pictures, in the order of their rows
                per_image = len(tensor) // sum(self.images)
                first = sum(self.images[:row])
                inputs[name] = tensor[first * per_image : (first + self.images[row]) * per_image]
        return Tried(self.name, self.model, inputs, self.images[row : row + 1])


def text_model() -> PreTrainedModel:
    """Build a tiny Qwen2."""
    return _built(AutoModelForCausalLM, Qwen2Config(**TEXT))


def vision_model() -> PreTrainedModel:
    """Build a tiny Qwen2-VL, with M-RoPE and a vision tower."""
    config = Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return _built(AutoModelForImageTextToText, config)


def prompts(name: str, model: PreTrainedModel, lengths: Sequence[int], images: Sequence[int], seed: int) -> Tried:
    """Create a left-padded batch of prompts with random words; `lengths` count their pictures' tokens too."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, (length, count) in enumerate(zip(lengths, images, strict=True)):
        words = torch.randperm(VOCABULARY - FIRST_TEXT, generator=generator) + FIRST_TEXT
        picture = torch.tensor([VISION_START, *[IMAGE] * IMAGE_TOKENS, VISION_END] * count, dtype=torch.long)
        text = words.repeat(length // len(words) + 1)[: length - len(picture)]
        ids[row, -length:] = torch.cat([text[:3], picture, text[3:]])
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    if name != "qwen2":
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    if sum(images):
        frames, height, width = GRID
        inputs["pixel_values"] = torch.randn(
            sum(images) * frames * height * width, 3 * 2 * 14 * 14, generator=generator
        )
        inputs["image_grid_thw"] = torch.tensor([GRID] * sum(images))
    return Tried(name, model, inputs, tuple(images))


@torch.no_grad()
def _built(auto: type, config: Qwen2Config | Qwen2VLConfig) -> PreTrainedModel:
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
