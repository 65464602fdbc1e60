"""What each key of a prompt receives from its queries: column sums of the causal attention, in memory linear in the
prompt.

Everywhere: queries (batch, heads, columns, head_dim) and keys (batch, kv_heads, columns, head_dim) of one prompt;
`padding` None or a LongTensor (batch, 1 or kv_heads) with the number of leading columns that hold nothing; `weights`
None for one per query, or what each query counts, bool or float (batch, columns), none negative; the result fp32
(batch, kv_heads, columns), averaged over the query heads of a KV head. Pads give and receive nothing.
"""

from dataclasses import dataclass

import torch

from .ragged_decode import has_triton

BLOCK = 128  # queries of each head at a time; 64 and 32 took as long at 8192 tokens, and longer below 1000


def column_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    padding: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the attention has noted on its way, our Triton kernel on CUDA, and plain torch elsewhere."""
    noted: Noted | None = getattr(queries, "column_sums", None)
    if noted is not None and padding is None and weights is None and noted.is_of(keys, scaling):
        return noted.sums
    if queries.device.type == "cuda" and has_triton():
        from .column_sums_triton import column_sums_triton

        return column_sums_triton(queries, keys, scaling, padding, weights)
    return column_sums_blocked(queries, keys, scaling, padding, weights)


@dataclass(frozen=True)
class Noted:
    """The column sums of queries, attached to their tensor as `column_sums`, for these keys and this scaling."""

    keys: torch.Tensor
    scaling: float
    sums: torch.Tensor

    def is_of(self, keys: torch.Tensor, scaling: float) -> bool:
        same = keys.data_ptr() == self.keys.data_ptr() and keys.shape == self.keys.shape
        return same and keys.stride()[2:] == self.keys.stride()[2:] and scaling == self.scaling


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
