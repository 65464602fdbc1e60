"""The compiled kernel of groups on a CPU (grouped.cpp): a token attends to packed entries without unpacking them to
memory. `grouped.py` has the shapes.
"""

import ctypes
from functools import cache

import torch

from .compiled import library
from .pieces import Pieces

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@cache
def kernels() -> ctypes.CDLL | None:
    """None without a compiler."""
    found = library("grouped")
    if found is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        found.kvcompress_attend_groups.argtypes = [
            *[pointer] * 3, *[number] * 11, *[pointer] * 2, *[number] * 3, ctypes.c_float, number, pointer,
        ]  # fmt: skip
        found.kvcompress_attend_groups.restype = None
    return found


def decode_grouped(
    query: torch.Tensor,
    pieces: Pieces,
    recent_keys: torch.Tensor,
    recent_values: torch.Tensor,
    recent: int,
    scaling: float,
) -> torch.Tensor:
    """As in grouped.py; in fp32 whatever the dtype."""
    asked = query.float().contiguous()
    blocks, batch, kv_heads = pieces.ends.shape
    output = asked.new_empty(*query.shape[:3], recent_values.shape[3])
    kernels().kvcompress_attend_groups(
        asked.data_ptr(),
        pieces.table.data_ptr(),
        pieces.ends.data_ptr(),
        blocks,
        batch,
        kv_heads,
        query.shape[1] // kv_heads,
        pieces.longest,
        query.shape[3],
        recent_values.shape[3],
        pieces.quantizer.bits,
        pieces.quantizer.group_size,
        pieces.quantizer.backend == "hqq",
        KINDS[pieces.dtype],
        recent_keys.data_ptr(),
        recent_values.data_ptr(),
        recent,
        recent_keys.shape[2],
        KINDS[recent_keys.dtype],
        scaling,
        torch.get_num_threads(),
        output.data_ptr(),
    )
    return output.to(query.dtype)
