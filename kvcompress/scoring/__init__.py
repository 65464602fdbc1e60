"""Building blocks of methods: window attention, sums over queries, selection, merging, budgets, vision tokens."""

from ..kernels.column_sums import column_sums
from .layer_view import Kept, LayerView, gather, uniform_noise
from .selection import adaptive_indices, ranks, top_indices
from .windows import (
    aligned_left,
    aligned_right,
    attention_blocks,
    pad_columns,
    pool_scores,
    protect_ends,
    protect_recent,
    window_attention,
    window_logits,
)

__all__ = [
    "Kept",
    "LayerView",
    "adaptive_indices",
    "aligned_left",
    "aligned_right",
    "attention_blocks",
    "column_sums",
    "gather",
    "pad_columns",
    "pool_scores",
    "protect_ends",
    "protect_recent",
    "ranks",
    "top_indices",
    "uniform_noise",
    "window_attention",
    "window_logits",
]
