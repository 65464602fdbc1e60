"""Non-causal attention: keys that neighbours on both sides attend to. https://arxiv.org/abs/2507.08143"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.windows import aligned_left, aligned_right, pool_scores
from .base import KVCluster


def non_causal_attention(queries: torch.Tensor, keys: torch.Tensor, counted: torch.Tensor, chunk: int) -> torch.Tensor:
    """Return the attention that each key receives from all queries of its chunk, including those before it.

    It is the softmax of the unscaled q'k over the chunk's keys, summed over the queries and averaged over the query
    heads. Memory holds one chunk's weights at a time.

    Args:
        queries: (batch, heads, columns, head_dim), for the same columns as the keys.
        keys: (batch, kv_heads, columns, head_dim).
        counted: bool (batch, 1, columns): other columns neither attend nor are attended to. Chunks start at column 0.

    Returns:
        (batch, kv_heads, columns) in fp32, zero for columns that are not counted.
    """
    queries = queries.unflatten(1, (keys.shape[1], -1))
    received = []
    for asks, answers, here in zip(*(x.split(chunk, -2) for x in (queries, keys, counted[..., None])), strict=True):
        logits = asks.float() @ answers.float()[:, :, None].mT
        logits = logits.masked_fill(~here.mT[:, :, None], float("-inf"))
        weights = logits.softmax(-1).masked_fill(~here[:, :, None], 0.0)
        received.append(weights.sum(3).mean(2))
    return torch.cat(received, -1)


def filled_up(
    queries: torch.Tensor, keys: torch.Tensor, counted: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad each row's last, shorter chunk with zero tokens; takes and returns the arguments of `non_causal_attention`.

    The zero tokens attend and are attended to: kvpress masks them with -1e-9, which hides nothing. The counted columns
    begin at column 0."""
    queries, keys = (
        F.pad(states.masked_fill(~counted[..., None], 0.0), (0, 0, 0, -states.shape[2] % chunk))
        for states in (queries, keys)
    )
    chunks = (counted.sum(-1, keepdim=True) + chunk - 1) // chunk
    return queries, keys, torch.arange(keys.shape[2], device=keys.device) < chunks * chunk


@register_method("non-causal-attention")
@dataclass(frozen=True)
class NonCausalAttentionKVCluster(KVCluster):
    """Keeps the keys with most attention within their chunk, without a causal mask (the attention part of Compactor).

    Every query of a chunk of `chunk_size` tokens votes for every key, so early tokens have no more voters than late
    ones. Votes are multiplied by the value's norm and pooled over three neighbours (256 as in the authors' kvpress).
    Logits are not scaled; in the authors' compactor-vllm they are.

    Chunks are counted from a row's first token. A last, shorter chunk is used as it is; with `variant="kvpress"` it is
    padded with zero tokens, which attend to everything equally and which every query attends to, as in kvpress. While
    decoding, the causal attention of the last 32 queries votes instead, because the queries of stored entries are gone.
    """

    chunk_size: PositiveInt = 256
    variant: Literal["exact", "kvpress"] = "exact"

    paper: ClassVar[str] = "https://arxiv.org/abs/2507.08143"
    whole_prompt: ClassVar[bool] = True
    fills_chunks: ClassVar[bool] = False
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"kvpress": {"fills_chunks": True}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        counted, fills = view.real_columns(keys), self.of_variant("fills_chunks")
        return value_weighted_votes(queries, keys, values, view, self.chunk_size, counted, fills=fills)


def value_weighted_votes(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: LayerView,
    chunk: int,
    counted: torch.Tensor,
    first: int = 0,
    fills: bool = False,
) -> torch.Tensor:
    """Return `non_causal_attention` times the value's norm, pooled: (batch, kv_heads, columns) in fp32.

    It is zero for columns that are not `counted`. Chunks begin at each row's token `first`; `fills` pads the last one
    (`filled_up`). For stored entries, whose queries are gone, the attention of the latest queries is used."""
    padding, columns = view.padding, keys.shape[2]
    if view.is_decoding:
        votes = view.column_sums(queries, keys)
    else:
        first = min(first, columns)
        aligned = [aligned_left(states, padding)[:, :, first:] for states in (queries, keys, counted)]
        if fills:
            aligned = filled_up(*aligned, chunk)
        votes = non_causal_attention(*aligned, chunk)[..., : columns - first]
        votes = aligned_right(F.pad(votes, (first, 0)), padding)
    scores = (votes * values.float().norm(dim=-1)).masked_fill(~counted, 0.0)
    return pool_scores(scores, 3, "avg").masked_fill(~counted, 0.0)
