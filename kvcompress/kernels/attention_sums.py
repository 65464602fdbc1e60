"""A prompt's causal attention together with its column sums, for scores that use all queries.

Computing column sums afterwards needs the attention matrix a second time. Here the weights are summed as they are
computed, which costs next to nothing beyond the attention. Queries are processed in blocks, so memory is linear in the
prompt."""

import torch

from .column_sums import attention_of_heads

ROWS = 384  # per block, over all query heads of a KV head: matrix products are fast and the weights stay in cache


def attention_with_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a prompt without padding, in fp32 on a CPU.

    Args:
        query: (batch, heads, columns, head_dim).
        key, value: (batch, kv_heads, columns, head_dim).

    Returns:
        The output (batch, columns, heads, head_dim), as from transformers' attention functions, and `column_sums(query,
            key, scaling)`, (batch, kv_heads, columns).
    """
    batch, kv_heads, columns, _ = key.shape
    groups = query.shape[1] // kv_heads
    output = query.new_empty(batch, columns, kv_heads, groups, value.shape[3])
    sums = torch.zeros(batch, kv_heads, columns, dtype=torch.float32)
    mean = torch.tensor(1 / groups, dtype=torch.float32)
    for at, weights in attention_of_heads(query, key, scaling, max(1, ROWS // groups)):
        block = (weights @ value[at.row, at.head, : at.end]).unflatten(0, (groups, -1))
        output[at.row, at.start : at.end, at.head] = block.transpose(0, 1)
        sums[at.row, at.head, : at.end] += mean.expand(len(weights)) @ weights
    return output.flatten(2, 3), sums
