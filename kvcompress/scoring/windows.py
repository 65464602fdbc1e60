"""Score primitives that the methods share.

Shapes: q (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, head_dim), scores (batch, kv_heads, keys).
Entries with a higher score are kept longer.

Padding is on the left: `padding` is None or a LongTensor (batch, 1 or kv_heads) with the number of leading columns that
hold nothing.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F

from ..device import on_device

BLOCK = 128  # queries whose weights are in memory at a time


def pad_columns(padding: torch.Tensor, columns: int) -> torch.Tensor:
    """Return bool (batch, 1 or kv_heads, columns), True at pad columns."""
    return torch.arange(columns, device=padding.device) < padding[..., None]


def products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return queries (batch, kv_heads, queries, head_dim) times keys, (batch, kv_heads, queries, keys) in fp32.

    On CUDA, tensor cores multiply 16-bit numbers: the products are exact and their sums in fp32, as in the other case,
    but no copy of the keys in fp32 is made."""
    if keys.device.type == "cuda" and keys.dtype.itemsize == 2 and queries.dtype == keys.dtype:
        found = torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), out_dtype=torch.float32)
        return found.unflatten(0, keys.shape[:2])
    return queries.float() @ keys.float().transpose(2, 3)


def window_logits(
    queries: torch.Tensor,
    keys: torch.Tensor,
    window: int,
    scaling: float,
    padding: torch.Tensor | None = None,
    key_columns: torch.Tensor | None = None,
    seen: int | None = None,
    hides_window: bool = False,
) -> torch.Tensor:
    """Return the scaled products of the last `window` queries with all keys, in fp32; -inf at invisible keys.

    Only `window` rows are computed, so memory is linear in the prompt. Queries are grouped by KV head without repeating
    the keys.

    Args:
        padding: see the module.
        key_columns, seen: while decoding, the sequence column of each key (batch, kv_heads, keys) and the number of
            columns seen; without them, keys and queries are those of one prompt.
        hides_window: the last `window` keys are invisible to all queries.

    Returns:
        (batch, kv_heads, groups, window, keys). `window` is at most the number of queries.
    """
    batch, kv_heads, columns, head_dim = keys.shape
    hidden, window = window, min(window, queries.shape[2])
    groups = queries.shape[1] // kv_heads
    recent = queries[:, :, -window:].reshape(batch, kv_heads, groups * window, head_dim)
    logits = products(recent, keys).mul_(scaling).view(batch, kv_heads, groups, window, columns)
    if hides_window:  # keys that come after a query are among them, because entries are in order
        logits[..., columns - min(hidden, columns) :] = float("-inf")
    elif key_columns is None:  # the last `window` columns are causal; all columns before them are visible
        logits[..., -window:].masked_fill_(_future(window, keys.device), float("-inf"))
    elif window > 1:  # the last query sees all keys
        query_columns = torch.arange(seen - window, seen, device=keys.device)
        future = key_columns[:, :, None, :] > query_columns[:, None]
        logits.masked_fill_(future[:, :, None], float("-inf"))
    if padding is not None:
        logits.masked_fill_(pad_columns(padding, columns)[:, :, None, None, :], float("-inf"))
    return logits


@lru_cache(maxsize=32)  # the same in every layer
def _future(window: int, device: torch.device) -> torch.Tensor:
    """Return bool (window, window), True where the key comes after the query."""
    with torch.inference_mode(False):
        return torch.ones(window, window, dtype=torch.bool, device=device).triu(1)


def window_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    window: int,
    scaling: float,
    padding: torch.Tensor | None = None,
    key_columns: torch.Tensor | None = None,
    seen: int | None = None,
) -> torch.Tensor:
    """Return the causal attention weights of the last `window` queries over all keys: the softmax of `window_logits`.

    Arguments and shape are those of `window_logits`. Rows of pad queries are zero."""
    weights = window_logits(queries, keys, window, scaling, padding, key_columns, seen).softmax(-1)
    if key_columns is None and padding is None:
        return weights
    if key_columns is None:
        pads = pad_columns(padding, keys.shape[2])[:, :, None, None, -weights.shape[3] :]
        weights.masked_fill_(pads.transpose(3, 4), 0.0)
    return weights.nan_to_num_(0.0)  # a pad is NaN or sees no key; a query older than all kept keys sees none either


def attention_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    padding: torch.Tensor | None = None,
    first: int = 0,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield a prompt's causal attention weights from query column `first` on, one block of queries at a time.

    For scores that need all queries. Memory holds `BLOCK` rows.

    Yields:
        the block's query columns, and their weights (batch, kv_heads, groups, rows, keys) in fp32 over the keys up to
        the block's end (later keys are not visible); rows of pad queries are zero.
    """
    for start in range(first, keys.shape[2], BLOCK):
        end = min(start + BLOCK, keys.shape[2])
        yield slice(start, end), window_attention(queries[:, :, :end], keys[:, :, :end], end - start, scaling, padding)


def protect_recent(scores: torch.Tensor, recent: list[int]) -> torch.Tensor:
    """Return the scores (batch, kv_heads, keys) with +inf at the last `recent[row]` columns of each row."""
    if len(set(recent)) == 1:
        protected = scores.clone()
        protected[..., max(scores.shape[-1] - int(recent[0]), 0) :] = float("inf")  # a fraction is rounded down
        return protected
    age = torch.arange(scores.shape[-1], 0, -1, device=scores.device)  # 1 at the last column
    young = age <= on_device(recent, scores.device)[:, None]
    return scores.masked_fill(young[:, None], float("inf"))


def protect_ends(scores: torch.Tensor, sinks: int, padding: torch.Tensor | None) -> torch.Tensor:
    """Return the scores (batch, kv_heads, keys) with +inf at each row's first `sinks` tokens and at its last."""
    protected = scores.clone()
    protected[..., -1:] = float("inf")
    if padding is None:
        protected[..., :sinks] = float("inf")
        return protected
    position = torch.arange(scores.shape[-1], device=scores.device)
    return protected.masked_fill(position < padding[..., None] + sinks, float("inf"))


def pool_scores(scores: torch.Tensor, kernel_size: int, mode: str) -> torch.Tensor:
    """Pool scores (`avg` or `max`) along the keys, keeping their length; zeros pad both ends, as in SnapKV."""
    pool = {"avg": F.avg_pool1d, "max": F.max_pool1d}[mode]
    flat = pool(scores.flatten(0, -2).unsqueeze(1), kernel_size, stride=1, padding=kernel_size // 2)
    return flat.view(scores.shape)


def aligned_left(states: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """Move each row's first real token to column 0 and its pads to the end: (batch, kv_heads, columns, ...)."""
    return states if padding is None else _rotated(states, padding)


def aligned_right(states: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """Undo `aligned_left`."""
    return states if padding is None else _rotated(states, -padding)


def _rotated(states: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return states whose column c is column c + by, modulo the number of columns; `by` is (batch, 1 or kv_heads)."""
    columns = states.shape[2]
    source = (torch.arange(columns, device=states.device) + by[..., None]) % columns
    source = source.expand(states.shape[:3])
    return states.gather(2, source if states.ndim == 3 else source[..., None].expand_as(states))
