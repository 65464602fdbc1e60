"""Attention of one token over entries that were quantized in groups, where they lie: our compiled C++ on a CPU, our
Triton kernel on CUDA. Entries are unpacked and attended to in plain torch where there is no compiler or Triton.

Codes, scales and zeros stay the tensors that optimum-quanto or hqq made: codes (groups, group_size), of which those of
groups that lie `groups * bits / 8` apart share a byte, quanto's first group in its lowest bits, hqq's in its highest.
"""

from dataclasses import dataclass

import torch

from ..device import on_device
from .quantization import Quantized, Quantizer
from .ragged_decode import has_triton


@dataclass(frozen=True)
class Pieces:
    """Quantized entries of all rows, in blocks that were quantized one after the other.

    Attributes:
        table: LongTensor (blocks, batch, 9): of keys and of values the addresses of codes, scales and zeros, and the
            rows of the codes' bytes; the entries of all KV heads.
        ends: LongTensor (blocks, batch, kv_heads), where each head's entries end among these.
        longest: the most entries of a head, in all blocks.
        dtype: of scales and zeros.
    """

    table: torch.Tensor
    ends: torch.Tensor
    longest: int
    quantizer: Quantizer
    dtype: torch.dtype


def pieces(blocks: list[list[tuple[Quantized, Quantized]]], ends: torch.Tensor, longest: int) -> Pieces:
    """Of the keys (head_dim, entries of all heads) and values (entries of all heads, head_dim) of each row of each
    block, which have to outlive the result; other arguments as in `Pieces`."""
    rows = [[[*_address(keys), *_address(values), keys.shape[1]] for keys, values in block] for block in blocks]
    first = blocks[0][0][0]
    return Pieces(on_device(rows, ends.device), ends, longest, first.quantizer, first.tensors[1].dtype)


def _address(part: Quantized) -> list[int]:
    return [*(tensor.data_ptr() for tensor in part.tensors), len(part.tensors[0])]


def has_kernels(device: torch.device) -> bool:
    """Whether entries are attended to where they lie."""
    if device.type == "cpu":
        from .grouped_cpu import kernels

        return kernels() is not None
    return device.type == "cuda" and has_triton()


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
        from .grouped_cpu import decode_grouped

        return decode_grouped(query, quantized, recent_keys, recent_values, recent, scaling)
    from .grouped_triton import grouped_decode_triton

    return grouped_decode_triton(query, quantized, recent_keys, recent_values, recent, scaling)
