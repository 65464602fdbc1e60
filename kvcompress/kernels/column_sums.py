"""Column sums of a prompt's causal attention: what each key receives from all queries, in memory linear in the prompt.

Throughout, queries are (batch, heads, columns, head_dim) and keys (batch, kv_heads, columns, head_dim) of one prompt.
`padding` is a LongTensor (batch, 1 or kv_heads), the number of leading columns that hold nothing, or None. `weights`
are the queries' weights, bool or float (batch, columns), not negative; None: 1 for each query. The result is (batch,
kv_heads, columns) in fp32, averaged over the query heads of a KV head. Pads give and receive nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..device import runs_triton

BLOCK = 128  # queries per head at a time; 64 and 32 took as long at 8192 tokens, and longer below 1000


def column_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    padding: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the column sums that the attention has stored, or compute them: on CUDA in Triton, otherwise in plain
    PyTorch."""
    noted: Noted | None = getattr(queries, "column_sums", None)
    if noted is not None and padding is None and weights is None and noted.is_of(keys, scaling):
        return noted.sums
    if runs_triton(queries.device):
        from .column_sums_triton import column_sums_triton

        return column_sums_triton(queries, keys, scaling, padding, weights)
    return column_sums_blocked(queries, keys, scaling, padding, weights)


@dataclass(frozen=True)
class Noted:
    """Column sums for these keys and this scaling, attached to the tensor of queries as its `column_sums`."""

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
    """The reference: computed from the whole attention matrix in fp64."""
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
    """Compute one block of the attention at a time, from the first query with a nonzero weight on."""
    groups = queries.shape[1] // keys.shape[1]
    sums = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    counts = (torch.ones(len(keys), keys.shape[2], device=keys.device) if weights is None else weights).float()
    starts = None if weights is None else (weights != 0).int().argmax(1).tolist()
    for at, attention in attention_of_heads(queries, keys, scaling, block, padding, starts):
        per_query = (counts[at.row, at.start : at.end] / groups).repeat(groups)
        sums[at.row, at.head, at.pad : at.end] += per_query @ attention
    return sums


class Block(NamedTuple):
    """Queries `start` to `end` of a row's KV head, which see the keys from `pad` on."""

    row: int
    head: int
    pad: int
    start: int
    end: int


def attention_of_heads(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    block: int,
    padding: torch.Tensor | None = None,
    starts: list[int] | None = None,
) -> Iterator[tuple[Block, torch.Tensor]]:
    """Yield a prompt's causal attention head by head, `block` queries at a time, over the keys up to them.

    What is written is thus read again while it is in the CPU cache. `starts` holds each row's first query of interest.

    Yields:
        The block, and its weights (groups * queries, keys from `pad` to `end`) in fp32, overwritten by the next block.
    """
    batch, kv_heads, columns, head_dim = keys.shape
    groups = queries.shape[1] // kv_heads
    block = min(block, columns)
    pads = [[0] * kv_heads] * batch if padding is None else padding.expand(batch, kv_heads).tolist()
    future = torch.full((block, block), float("-inf"), dtype=torch.float32, device=keys.device).triu_(1)
    buffer = torch.empty(groups * block * columns, dtype=torch.float32, device=keys.device)
    for row in range(batch):
        for head in range(kv_heads):
            pad = pads[row][head]
            seen = keys[row, head].float().T  # (head_dim, columns)
            asking = queries[row, head * groups : (head + 1) * groups].float() * scaling
            for start in range(max(pad, starts[row] if starts else 0), columns, block):
                end = min(start + block, columns)
                size = end - start
                shape = (groups * size, end - pad)
                weights = buffer[: shape[0] * shape[1]].view(shape)
                torch.mm(asking[:, start:end].reshape(groups * size, head_dim), seen[:, pad:end], out=weights)
                weights.view(groups, size, -1)[..., start - pad :].add_(future[:size, :size])
                yield Block(row, head, pad, start, end), torch.softmax(weights, -1, out=weights)
