"""A prompt's causal attention and, on the way, what each key receives: for scores that need all queries.

Column sums that are made afterwards need the attention matrix a second time. Here its weights are summed while they are
there, which costs next to nothing beyond the attention. A block of queries at a time: memory is linear in the prompt.
"""

import torch

ROWS = 384  # of a block, all query heads of a KV head counted: the matrix products are fast, the weights stay in cache


def attention_with_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a prompt without padding, in fp32 on a CPU.

    Args:
        query: (batch, heads, columns, head_dim); key, value: (batch, kv_heads, columns, head_dim).

    Returns:
        the output (batch, columns, heads, head_dim), as transformers' attention functions return it; and
        `column_sums(query, key, scaling)`, (batch, kv_heads, columns).
    """
    batch, kv_heads, columns, _ = key.shape
    groups = query.shape[1] // kv_heads
    output = query.new_empty(batch, columns, kv_heads, groups, value.shape[3])
    sums = torch.zeros(batch, kv_heads, columns)
    query = (query * scaling).unflatten(1, (kv_heads, groups))
    block = min(columns, max(1, ROWS // groups))
    weights = query.new_empty(groups * block * columns)
    future = torch.full((block, block), float("-inf")).triu_(1)
    mean = torch.full((1, groups * block), 1 / groups)
    for row in range(batch):
        for head in range(kv_heads):
            keys, values = key[row, head].T.contiguous(), value[row, head]
            for start in range(0, columns, block):
                end = min(start + block, columns)
                size = end - start
                seen = weights[: groups * size * end].view(groups * size, end)
                torch.mm(query[row, head, :, start:end].reshape(groups * size, -1), keys[:, :end], out=seen)
                seen.view(groups, size, end)[..., start:].add_(future[:size, :size])
                torch.softmax(seen, -1, out=seen)
                output[row, start:end, head] = (seen @ values[:end]).view(groups, size, -1).transpose(0, 1)
                sums[row, head, :end] += torch.mm(mean[:, : groups * size], seen)[0]
    return output.flatten(2, 3), sums
