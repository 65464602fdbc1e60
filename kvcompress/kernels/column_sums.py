"""What each key of a prompt receives from its queries: column sums of the causal attention, in memory linear in the
prompt.

Everywhere: queries (batch, heads, columns, head_dim) and keys (batch, kv_heads, columns, head_dim) of one prompt;
`padding` None or a LongTensor (batch, 1 or kv_heads) with the number of leading columns that hold nothing; `weights`
None for one per query, or what each query counts, bool or float (batch, columns), none negative; the result fp32
(batch, kv_heads, columns), averaged over the query heads of a KV head. Pads give and receive nothing.
"""

import torch

from .ragged_decode import has_triton

BLOCK = 64  # queries of each head; the attention of a block then stays in a CPU's cache


def column_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    padding: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Our Triton kernel on CUDA, and plain torch elsewhere."""
    if queries.device.type == "cuda" and has_triton():
        from .column_sums_triton import column_sums_triton

        return column_sums_triton(queries, keys, scaling, padding, weights)
    return column_sums_blocked(queries, keys, scaling, padding, weights)


def column_sums_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    padding: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """What all of them compute, from the whole attention in fp64."""
    _, kv_heads, columns, _ = keys.shape
    grouped = queries.double().unflatten(1, (kv_heads, -1))  # (batch, kv_heads, groups, columns, head_dim)
    logits = grouped @ keys.double().unsqueeze(2).transpose(3, 4) * scaling
    column = torch.arange(columns, device=keys.device)
    visible = column <= column[:, None]
    if padding is not None:
        visible = visible & (column >= padding[..., None])[:, :, None, None]
    attention = logits.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)  # a pad query sees no key
    if weights is not None:
        attention = attention * weights.double()[:, None, None, :, None]
    return attention.sum(3).mean(2).float()


def column_sums_blocked(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    padding: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    block: int = BLOCK,
) -> torch.Tensor:
    """Head by head, `block` queries at a time and only the keys up to them, so that what is written is read again while
    it is in the cache; queries before the first that counts are left out."""
    batch, kv_heads, columns, head_dim = keys.shape
    groups = queries.shape[1] // kv_heads
    sums = torch.zeros(keys.shape[:3], device=keys.device)
    pads = [[0] * kv_heads] * batch if padding is None else padding.expand(batch, kv_heads).tolist()
    starts = [0] * batch if weights is None else (weights != 0).int().argmax(1).tolist()
    each = torch.ones(columns, device=keys.device)
    future = torch.ones(block, block, dtype=torch.bool, device=keys.device).triu(1)
    logits = torch.empty(2, groups * block * columns, device=keys.device)  # and their softmax
    for row in range(batch):
        counts = (each if weights is None else weights[row].float()) / groups
        for head in range(kv_heads):
            pad = pads[row][head]
            seen = keys[row, head].float().T  # (head_dim, columns)
            asking = queries[row, head * groups : (head + 1) * groups].float() * scaling
            for start in range(max(pad, starts[row]), columns, block):
                end = min(start + block, columns)
                size = end - start
                of_block = asking[:, start:end].reshape(groups * size, head_dim)
                shape = (groups * size, end - pad)
                block_logits, attention = (part[: shape[0] * shape[1]].view(shape) for part in logits)
                torch.mm(of_block, seen[:, pad:end], out=block_logits)
                latest = block_logits.view(groups, size, -1)[..., start - pad :]
                latest.masked_fill_(future[:size, :size], float("-inf"))
                torch.softmax(block_logits, -1, out=attention)
                sums[row, head, pad:end] += counts[start:end].repeat(groups) @ attention
    return sums
