"""Vectors packed and packed entries attended to, each the fastest way of their device: our compiled C++ on a CPU, our
Triton kernels on CUDA, and plain torch (turboquant.py), which all of them equal, where there is no compiler or Triton.
"""

import torch

from ..device import runs_triton
from . import turboquant_cpu
from .turboquant import TurboQuant

Codecs = tuple[TurboQuant, TurboQuant]


def has_kernels(device: torch.device) -> bool:
    """Whether packed entries are attended to where they lie."""
    if device.type == "cpu":
        return turboquant_cpu.kernels() is not None
    return runs_triton(device)


def pack(keys: torch.Tensor, values: torch.Tensor, codecs: Codecs) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., dim) -> uint8 (..., nbytes), each by its codec."""
    if not has_kernels(keys.device):
        return codecs[0].pack(keys), codecs[1].pack(values)
    parts = zip((keys, values), codecs, strict=True)
    packed = tuple(keys.new_empty(*part.shape[:-1], codec.nbytes, dtype=torch.uint8) for part, codec in parts)
    ends = torch.zeros(1, dtype=torch.long, device=keys.device)
    flat = (part.reshape(1, 1, -1, part.shape[-1]) for part in (keys, values))
    pack_behind(*(part.flatten(0, -2) for part in packed), ends, 0, *flat, codecs)
    return packed


def pack_behind(
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
    ends: torch.Tensor,
    first: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    codecs: Codecs,
) -> None:
    """Write vectors (batch, kv_heads, new, dim) into `packed_keys` and `packed_values`, contiguous uint8 (rows,
    nbytes): those of each segment from the row on that `ends`, LongTensor (batch * kv_heads,), and `first` add up
    to."""
    if has_kernels(keys.device):
        if keys.device.type == "cpu":
            turboquant_cpu.pack_behind(packed_keys, packed_values, ends + first, keys, values, codecs)
        else:
            from .turboquant_triton import pack_behind_triton

            pack_behind_triton(packed_keys, packed_values, ends, first, keys, values, codecs)
        return
    new = torch.arange(first, first + keys.shape[2], device=ends.device)
    rows = (ends[:, None] + new).flatten()
    for packed, part, codec in zip((packed_keys, packed_values), (keys, values), codecs, strict=True):
        packed.index_copy_(0, rows, codec.pack(part).flatten(0, 2))


def packed_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    visible: torch.Tensor | None,
    codecs: Codecs,
    scaling: float,
    appended: int = 0,
) -> torch.Tensor:
    """Attention of one token over packed segments, for a device that `has_kernels`.

    Args: as in ragged_decode.py, keys and values uint8 (rows, nbytes).
        visible: on a CPU, bool (batch, 1 or kv_heads, longest): False where nobody may look; None: all may be seen.
    """
    if query.device.type == "cpu":
        lengths = lengths + appended
        return turboquant_cpu.decode_packed(query, keys, values, starts, lengths, longest, visible, codecs, scaling)
    from .ragged_decode_triton import ragged_decode_triton

    return ragged_decode_triton(
        query, keys, values, starts, lengths, longest, scaling, codecs=codecs, appended=appended
    )
