"""Numbers as 8-bit floats under one scale per tensor, bit for bit as in transformers' `Fp8QuantizedLayer`.

On CUDA with Triton one kernel writes a token, and one attends to entries where they lie."""

import torch

BITS = (8,)
FORMAT = torch.float8_e4m3fn
MOST = torch.finfo(FORMAT).max


def scale_of(states: torch.Tensor) -> torch.Tensor:
    """Return the scale under which the largest of the numbers is the largest 8-bit float: fp32, without dimensions."""
    return (states.abs().amax().float() / MOST).clamp(min=torch.finfo(torch.float32).tiny)


def pack(states: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the numbers, uint8 of the same shape. Numbers beyond the scale become the largest one."""
    # Not every torch saturates by itself. Bytes, since few operations take 8-bit floats.
    return (states.float() / scale).clamp(-MOST, MOST).to(FORMAT).view(torch.uint8)


def unpack(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of the bytes, in `dtype`."""
    return (packed.view(FORMAT).float() * scale).to(dtype)
