"""A model's attention over whatever an authors' cache holds, fed from recorded states."""

from collections.abc import Iterator

import torch

from .states import States

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def passes(given: States, place: int, prompt: int, decoded: int) -> Iterator[Layer]:
    """Queries, keys and values of a layer: of the prompt, then of one decoded token after the other."""
    for tokens in (slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, prompt + decoded))):
        yield given.layer(place, tokens)


def attention(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Causal weights (1, heads, queries, keys) of the last tokens' queries over all keys (1, kv_heads, keys, dim)."""
    groups, (new, columns) = queries.shape[1] // keys.shape[1], (queries.shape[2], keys.shape[2])
    logits = queries @ keys.repeat_interleave(groups, 1).mT * keys.shape[-1] ** -0.5
    future = torch.ones(new, columns, dtype=torch.bool).triu(columns - new + 1)
    return logits.masked_fill(future, -torch.inf).softmax(-1)


def grouped(weights: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Weights (1, heads, ...) as their mean over the query heads of each KV head: what code for models without groups
    is given here."""
    return weights.unflatten(1, (kv_heads, -1)).mean(2)


def behind(past: tuple[torch.Tensor, torch.Tensor] | None, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with new ones behind them."""
    return new if past is None else tuple(torch.cat(pair, 2) for pair in zip(past, new, strict=True))
