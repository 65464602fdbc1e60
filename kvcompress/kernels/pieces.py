"""Where the tensors of quantized entries lie in memory, for kernels that attend to them there.

Codes, scales and zeros stay the tensors that optimum-quanto or hqq made: codes (groups, group_size), of which those of
groups that lie `groups * bits / 8` apart share a byte, quanto's first group in its lowest bits, hqq's in its highest.
"""

from dataclasses import dataclass

import torch

from ..device import on_device
from .quantization import Quantized, Quantizer


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
