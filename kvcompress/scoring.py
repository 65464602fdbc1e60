"""Score primitives that the methods share. Shapes: q (batch, heads, queries, head_dim), k and v
(batch, kv_heads, keys, head_dim), scores (batch, kv_heads, keys); a higher score is kept longer.

Padding is on the left: `padding` is None or a LongTensor (batch,) with the number of pad columns of each row.
"""

import torch
import torch.nn.functional as F


def pad_columns(padding: torch.Tensor, columns: int) -> torch.Tensor:
    """True at pad columns: bool (batch, columns)."""
    return torch.arange(columns, device=padding.device) < padding[:, None]


def window_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    window: int,
    scaling: float,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention weights of the last `window` queries over all keys, in fp32.

    Only `window` rows are computed, so memory is linear in the prompt; queries are grouped onto their KV head
    without repeating the keys.

    Returns:
        (batch, kv_heads, groups, window, keys); rows of pad queries are zero. `window` shrinks to the number of
        queries where there are fewer.
    """
    batch, kv_heads, columns, head_dim = keys.shape
    window = min(window, queries.shape[2])
    groups = queries.shape[1] // kv_heads
    recent = queries[:, :, -window:].float().reshape(batch, kv_heads, groups * window, head_dim)
    logits = recent @ keys.float().transpose(2, 3) * scaling
    logits = logits.view(batch, kv_heads, groups, window, columns)
    # The last `window` columns are causal among themselves; everything before them is visible.
    future = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., -window:].masked_fill_(future, float("-inf"))
    if padding is None:
        return logits.softmax(-1)
    pads = pad_columns(padding, columns)[:, None, None, None, :]
    weights = logits.masked_fill_(pads, float("-inf")).softmax(-1)
    pad_queries = pads[..., -window:].transpose(3, 4)
    return weights.masked_fill_(pad_queries, 0.0)  # also clears the NaN of a pad query, which sees no key


def pool_scores(scores: torch.Tensor, kernel_size: int, mode: str) -> torch.Tensor:
    """1-D `avg` or `max` pooling along the keys, stride 1, same length; zeros beyond both ends count (as in SnapKV)."""
    pool = {"avg": F.avg_pool1d, "max": F.max_pool1d}[mode]
    flat = pool(scores.flatten(0, -2).unsqueeze(1), kernel_size, stride=1, padding=kernel_size // 2)
    return flat.view(scores.shape)


def top_indices(scores: torch.Tensor, budgets: list[int], padding: torch.Tensor | None = None) -> torch.Tensor:
    """The columns of the highest scores, ascending.

    Among equal scores (as among protected columns, which are +inf) the most recent wins, so that the selection
    depends neither on the batch nor on the device's top-k.

    Args:
        scores: (batch, kv_heads, keys).
        budgets: entries to keep per KV head, one number per row; at most the row's real tokens.
        padding: pad columns are never selected.

    Returns:
        LongTensor (batch, kv_heads, max(budgets)); a row with a smaller budget starts with -1, so that kept
        entries are aligned to the right.
    """
    columns, most = scores.shape[-1], max(budgets)
    if padding is not None:
        scores = scores.masked_fill(pad_columns(padding, columns)[:, None], float("-inf"))
    order = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :most]
    kept = columns - 1 - order
    if min(budgets) < most:
        rank = torch.arange(most, device=scores.device)
        over = rank >= torch.tensor(budgets, device=scores.device)[:, None]
        kept = kept.masked_fill(over[:, None], -1)
    return kept.sort(-1).values
