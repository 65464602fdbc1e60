"""Where the image and video tokens of a prompt are."""

import torch
from transformers import PreTrainedConfig

from .prompt import Prompt


def vision_token_ids(config: PreTrainedConfig) -> list[int]:
    """The placeholder ids of image and video tokens in `input_ids`, empty for a text-only model."""
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    return sorted({value for name in names if (value := getattr(config, name, None)) is not None})


def vision_token_mask(config: PreTrainedConfig, input_ids: torch.Tensor) -> torch.Tensor:
    """True at image and video tokens: bool (batch, columns). There may be several spans or none."""
    return torch.isin(input_ids, torch.tensor(vision_token_ids(config), device=input_ids.device, dtype=input_ids.dtype))


def observer_queries(prompt: Prompt, keys: torch.Tensor, fallback: int = 32) -> torch.Tensor:
    """The queries that ask about the images: the tokens behind each row's last vision token. bool (batch, columns).

    A row without vision tokens, or with none behind the last one, is observed by its last `fallback` real tokens;
    so is every row where vision tokens are unknown. `keys`: (batch, kv_heads, columns, head_dim).
    """
    columns = keys.shape[2]
    first = columns - torch.tensor(prompt.lengths, device=keys.device).clamp(max=fallback)
    if prompt.vision is not None:
        behind = prompt.vision.flip(1).int().argmax(1)  # columns behind the last vision token
        first = torch.where(prompt.vision.any(1) & (behind > 0), columns - behind, first)
    return torch.arange(columns, device=keys.device) >= first[:, None]
