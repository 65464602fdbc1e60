"""Copies the kept rows of a prompt's keys and values to new tensors.

Throughout, keys and values are (batch, kv_heads, columns, head_dim) with any strides. `indices` is a LongTensor (batch,
kv_heads, kept), -1 in unused slots, whose results are undefined. The results are contiguous, (batch, kv_heads, kept,
head_dim), and detached."""

import torch


@torch.no_grad()
def compact(keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy row by row on a CPU, measured to be the fastest there (benchmarks/results/kernels.md), otherwise with
    torch's gather.

    A Triton kernel that copied both in one launch was no faster on an H100 below some 10,000 rows of a head (`kept
    rows` in benchmarks/results/gpu/h100/kernels.json)."""
    if keys.device.type == "cpu":
        return _rows_of_heads(keys, indices), _rows_of_heads(values, indices)
    return compact_reference(keys, values, indices)


def compact_reference(
    keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in plain PyTorch."""
    rows = indices.clamp(min=0).unsqueeze(-1)
    kept_keys, kept_values = (s.gather(2, rows.expand(-1, -1, -1, s.shape[3])) for s in (keys, values))
    return kept_keys, kept_values


def _rows_of_heads(states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Copy whole rows per KV head; gather would look up every number separately."""
    batch, kv_heads, _, head_dim = states.shape
    kept = states.new_empty(batch, kv_heads, indices.shape[2], head_dim)
    for row in range(batch):
        for head in range(kv_heads):
            torch.index_select(states[row, head], 0, indices[row, head].clamp(min=0), out=kept[row, head])
    return kept
