"""Where the image and video tokens of a prompt are."""

import torch
from transformers import PreTrainedConfig


def vision_token_ids(config: PreTrainedConfig) -> list[int]:
    """The placeholder ids of image and video tokens in `input_ids`, empty for a text-only model."""
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    return sorted({value for name in names if (value := getattr(config, name, None)) is not None})


def vision_token_mask(config: PreTrainedConfig, input_ids: torch.Tensor) -> torch.Tensor:
    """True at image and video tokens: bool (batch, columns). There may be several spans or none."""
    return torch.isin(input_ids, torch.tensor(vision_token_ids(config), device=input_ids.device, dtype=input_ids.dtype))
