"""Where the image and video tokens of a prompt are."""

import torch
from transformers import PreTrainedConfig

from .prompt import Prompt
from .scoring import attention_blocks, column_sums, window_attention

RECENT_QUERIES = 32  # observe where no image says where the question begins
DECODED_QUERIES = 16  # observe while decoding


def vision_token_ids(config: PreTrainedConfig) -> list[int]:
    """The placeholder ids of image and video tokens in `input_ids`, empty for a text-only model."""
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    return sorted({value for name in names if (value := getattr(config, name, None)) is not None})


def vision_token_mask(config: PreTrainedConfig, input_ids: torch.Tensor) -> torch.Tensor:
    """True at image and video tokens: bool (batch, columns). There may be several spans or none."""
    return torch.isin(input_ids, torch.tensor(vision_token_ids(config), device=input_ids.device, dtype=input_ids.dtype))


def observer_queries(prompt: Prompt, keys: torch.Tensor, fallback: int = RECENT_QUERIES) -> torch.Tensor:
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


def question_attention(queries: torch.Tensor, keys: torch.Tensor, prompt: Prompt) -> torch.Tensor:
    """What each key receives from `observer_queries`, while decoding from the recent queries at hand: sums over the
    queries, averaged over the query heads of a KV head. (batch, kv_heads, keys); arguments as in `KVCluster.score`."""
    if prompt.columns is None:
        observers = observer_queries(prompt, keys)
        return column_sums(queries, keys, prompt.scaling, prompt.padding, observers)
    rows = queries.shape[2]
    weights = window_attention(queries, keys, rows, prompt.scaling, prompt.padding, prompt.columns, prompt.seen)
    return weights.sum(3).mean(2)


def elite_attention(queries: torch.Tensor, keys: torch.Tensor, prompt: Prompt, alpha: float = 0.9) -> torch.Tensor:
    """What each key of a prompt receives from the elite queries, on average (AirCache, section 3.2): of the observers
    those that the last query, mean over the heads, attends to with at least `alpha` of the most.

    A vision token's part is of the attention to vision tokens and elite only, a text token's of all attention.
    (batch, kv_heads, keys), averaged over the query heads of a KV head.
    """
    last = window_attention(queries, keys, 1, prompt.scaling, prompt.padding)[..., 0, :].mean((1, 2))
    observers = observer_queries(prompt, keys)
    last = last.masked_fill(~observers, 0.0)
    elite = observers & (last >= alpha * last.amax(1, keepdim=True))
    vision = torch.zeros_like(elite) if prompt.vision is None else prompt.vision
    first = int(observers.any(0).int().argmax())
    sums = torch.zeros(keys.shape[:3], device=keys.device)
    for rows, weights in attention_blocks(queries, keys, prompt.scaling, prompt.padding, first):
        at_vision = vision[:, None, None, None, : rows.stop]
        counted = weights * (vision | elite)[:, None, None, None, : rows.stop]
        counted = counted / counted.sum(-1, keepdim=True).clamp(min=torch.finfo(counted.dtype).tiny)
        weights = torch.where(at_vision, counted, weights) * elite[:, None, None, rows, None]
        sums[..., : rows.stop] += weights.sum(3).mean(2)
    return sums / elite.sum(1)[:, None, None]


def text_first(scores: torch.Tensor, prompt: Prompt) -> torch.Tensor:
    """Scores (batch, kv_heads, keys), none negative, changed so that every vision token ranks below all text; each
    kind keeps its own order, which adding a constant would round away. Unchanged where nothing is known of vision."""
    if prompt.vision is None:
        return scores
    below = -1 / scores.clamp(min=torch.finfo(scores.dtype).tiny)
    return torch.where(prompt.vision[:, None], below, scores)
