"""The compiled kernels of TurboQuant on a CPU (turboquant.cpp): vectors are rotated, packed and written in one, and a
token attends to packed entries without unpacking them to memory. `packed.py` has the shapes.
"""

import ctypes
from functools import cache
from typing import NamedTuple

import torch

from .compiled import library
from .turboquant import TurboQuant, codebook, rotation

MULTIPLE = 16  # of a rotation's columns: whole vector registers


@cache
def kernels() -> ctypes.CDLL | None:
    """None without a compiler."""
    found = library("turboquant")
    if found is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        found.kvcompress_pack.argtypes = [*[pointer] * 3, *[number] * 5, *[pointer] * 4, number, *[pointer] * 2]
        found.kvcompress_attend.argtypes = [
            *[pointer] * 5, *[number] * 3, pointer, *[number] * 4, *[pointer] * 4, ctypes.c_float, number, pointer,
        ]  # fmt: skip
        found.kvcompress_pack.restype = found.kvcompress_attend.restype = None
    return found


def pack_behind(
    packed_keys: torch.Tensor,
    packed_values: torch.Tensor,
    ends: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codecs: tuple[TurboQuant, TurboQuant],
) -> None:
    """As in packed.py; vectors of any float dtype, rotated in fp32."""
    vectors = [part.float().contiguous() for part in (keys, values)]
    tables = [_tables(codec.dim, codec.bits) for codec in codecs]
    ends = ends.contiguous()
    kernels().kvcompress_pack(
        *(part.data_ptr() for part in vectors),
        ends.data_ptr(),
        ends.numel(),
        keys.shape[2],
        *(codec.dim for codec in codecs),
        codecs[0].bits,
        *(table.forward.data_ptr() for table in tables),
        *(codec.boundaries.data_ptr() for codec in codecs),
        torch.get_num_threads(),
        packed_keys.data_ptr(),
        packed_values.data_ptr(),
    )


def decode_packed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    visible: torch.Tensor | None,
    codecs: tuple[TurboQuant, TurboQuant],
    scaling: float,
) -> torch.Tensor:
    """As in packed.py; in fp32 whatever the dtype."""
    asked = query.float().contiguous()
    starts, lengths = starts.contiguous(), lengths.contiguous()
    of_keys, of_values = (_tables(codec.dim, codec.bits) for codec in codecs)
    seen = None if visible is None else visible.expand(*starts.shape, -1).contiguous()
    output = asked.new_empty(*query.shape[:3], codecs[1].dim)
    kernels().kvcompress_attend(
        asked.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        starts.data_ptr(),
        lengths.data_ptr(),
        starts.numel(),
        longest,
        query.shape[1] // starts.shape[1],
        None if seen is None else seen.data_ptr(),
        0 if seen is None else seen.shape[2],
        codecs[0].dim,
        codecs[1].dim,
        codecs[0].bits,
        of_keys.forward.data_ptr(),
        of_values.back.data_ptr(),
        of_keys.codebook.data_ptr(),
        of_values.codebook.data_ptr(),
        scaling,
        torch.get_num_threads(),
        output.data_ptr(),
    )
    return output.to(query.dtype)


class _Tables(NamedTuple):
    """What vectors are multiplied by to rotate them, and to rotate them back, (dim, columns) with zeros behind; the
    codebook as often as it takes to fill 16 numbers."""

    forward: torch.Tensor
    back: torch.Tensor
    codebook: torch.Tensor


@cache
def _tables(dim: int, bits: int) -> _Tables:
    turns = (torch.nn.functional.pad(each, (0, -dim % MULTIPLE)) for each in (rotation(dim).T, rotation(dim)))
    return _Tables(*(turn.contiguous() for turn in turns), codebook(dim, bits).repeat(MULTIPLE // 2**bits))
