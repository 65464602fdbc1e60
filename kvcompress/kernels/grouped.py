"""Attention of one token over entries that were quantized in groups, where they lie: our compiled C++ on a CPU, our
Triton kernel on CUDA. Entries are unpacked and attended to in plain torch where there is no compiler or Triton.
"""

import torch

from ..device import runs_triton
from . import grouped_cpu
from .pieces import Pieces


def has_kernels(device: torch.device) -> bool:
    """Whether entries are attended to where they lie."""
    if device.type == "cpu":
        return grouped_cpu.kernels() is not None
    return runs_triton(device)


def grouped_decode(
    query: torch.Tensor,
    quantized: Pieces,
    recent_keys: torch.Tensor,
    recent_values: torch.Tensor,
    recent: int,
    scaling: float,
) -> torch.Tensor:
    """Attention of one token's queries (batch, heads, 1, head_dim) over quantized entries and the first `recent` of
    buffers (batch, kv_heads, capacity, head_dim), for a device that `has_kernels`; the result has the query's shape."""
    if query.device.type == "cpu":
        return grouped_cpu.decode_grouped(query, quantized, recent_keys, recent_values, recent, scaling)
    from .grouped_triton import grouped_decode_triton

    return grouped_decode_triton(query, quantized, recent_keys, recent_values, recent, scaling)
