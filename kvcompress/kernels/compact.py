"""The kept rows of a prompt's keys and values, moved to tensors of their own.

Everywhere: keys and values (batch, kv_heads, columns, head_dim), of any strides; `indices` LongTensor
(batch, kv_heads, kept), -1 in unused slots, where what stands in the result does not matter; the results contiguous,
(batch, kv_heads, kept, head_dim), detached.
"""

import torch


@torch.no_grad()
def compact(keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row on a CPU, where that is measured to be the fastest (benchmarks/results/kernels.md); torch's gather
    elsewhere: our Triton kernel, which takes both in one launch, is not yet measured."""
    if keys.device.type == "cpu":
        return _rows_of_heads(keys, indices), _rows_of_heads(values, indices)
    return compact_reference(keys, values, indices)


def compact_reference(
    keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What all of them compute, in plain torch."""
    rows = indices.clamp(min=0).unsqueeze(-1)
    kept_keys, kept_values = (s.gather(2, rows.expand(-1, -1, -1, s.shape[3])) for s in (keys, values))
    return kept_keys, kept_values


def _rows_of_heads(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """A copy of whole rows per KV head: gather looks up every number's place by itself."""
    batch, kv_heads, _, head_dim = states.shape
    kept = states.new_empty(batch, kv_heads, indices.shape[2], head_dim)
    for row in range(batch):
        for head in range(kv_heads):
            torch.index_select(states[row, head], 0, indices[row, head].clamp(min=0), out=kept[row, head])
    return kept
