"""Low-bit storage of states: which bits each backend offers, and groups of consecutive numbers that share a scale and a
zero, through optimum-quanto or hqq. The other backends are `turboquant.py` and `fp8.py`."""

import importlib.util
from dataclasses import dataclass

import torch

from ..errors import KVCompressError
from . import fp8, turboquant

BITS = {"quanto": (2, 4), "hqq": (1, 2, 4, 8), "turboquant": turboquant.BITS, "fp8": fp8.BITS}
PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}
PIP_NAMES = {"quanto": "optimum-quanto", "hqq": "hqq"}
ROWS_PER_BYTE = 8  # both pack several rows into one byte, so rows come in multiples


def check_bits(backend: str, bits: int) -> None:
    """Raises KVCompressError where the backend lacks these bits."""
    if bits not in BITS[backend]:
        offered = ", ".join(map(str, BITS[backend]))
        raise KVCompressError(f"kv_bits={bits} is not offered by kv_backend={backend!r}: {offered}")


@dataclass(frozen=True)
class Quantizer:
    """Quantizes tensors once and gives them back.

    Attributes:
        backend: `quanto` or `hqq`.
        bits: per number; which are offered depends on the backend.
        group_size: numbers that share a scale and a zero.
    """

    backend: str
    bits: int
    group_size: int

    def check(self) -> None:
        """Raises KVCompressError where the backend lacks these bits or is not installed."""
        check_bits(self.backend, self.bits)
        package = PACKAGES[self.backend]
        if importlib.util.find_spec(package.split(".")[0]) is None or importlib.util.find_spec(package) is None:
            raise KVCompressError(
                f"kv_backend={self.backend!r} is not installed: pip install {PIP_NAMES[self.backend]}"
            )

    def quantize(self, states: torch.Tensor) -> "Quantized":
        """`states` of any shape; groups run along the last dimension, then on through the others."""
        flat = states.reshape(-1)
        rows = max(-(-flat.numel() // self.group_size), 1)  # also of nothing: backends divide by the rows
        rows = -(-rows // ROWS_PER_BYTE) * ROWS_PER_BYTE
        # The filler repeats the last number, so that it does not widen a group's range.
        padded = flat.new_empty(rows * self.group_size)
        padded[: flat.numel()] = flat
        padded[flat.numel() :] = flat[-1:] if len(flat) else 0
        quantize, _ = _BACKENDS[self.backend]
        return Quantized(states.shape, quantize(padded.view(rows, self.group_size), self.bits), self, states.dtype)


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor: its shape, the tensors that it takes in memory, how they were made, and the dtype of what
    they stand for. It never changes, so that copies of a cache share it."""

    shape: torch.Size
    tensors: list[torch.Tensor]
    quantizer: Quantizer
    dtype: torch.dtype

    def dequantize(self) -> torch.Tensor:
        _, restore = _BACKENDS[self.quantizer.backend]
        rows = restore(self.tensors, self.quantizer.bits, self.quantizer.group_size, self.dtype)
        return rows.reshape(-1)[: self.shape.numel()].view(self.shape)

    def __deepcopy__(self, memo: dict[int, object]) -> "Quantized":
        return self


def _quanto(rows: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Packed numbers, scale and shift, (rows, 1) each."""
    from optimum.quanto import MaxOptimizer, qint2, qint4
    from optimum.quanto.tensor.packed import pack_weights

    scale, shift = MaxOptimizer()(rows, {2: qint2, 4: qint4}[bits], 0, None)
    codes = torch.ops.quanto.quantize_affine(rows, bits, 0, None, scale, shift)
    return [pack_weights(codes, bits), scale, shift]


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Do what quanto's own operator does, which on a CPU compiles for most of a minute at its first call."""
    return torch.cat([packed >> first & 2**bits - 1 for first in range(0, 8, bits)])


def _from_quanto(tensors: list[torch.Tensor], bits: int, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    packed, scale, shift = tensors
    return scale * unpacked(packed, bits)[: len(scale)] - shift


def _hqq(rows: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Packed numbers, scale and zero, (rows, 1) each."""
    from hqq.core.quantize import Quantizer as HQQ

    packed, meta = HQQ.quantize(
        rows, nbits=bits, axis=1, group_size=rows.shape[1], device=str(rows.device), compute_dtype=rows.dtype
    )
    return [packed, meta["scale"], meta["zero"]]


def _from_hqq(tensors: list[torch.Tensor], bits: int, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    from hqq.core.quantize import Quantizer as HQQ

    packed, scale, zero = tensors
    meta = {
        "nbits": bits,
        "axis": 1,
        "group_size": group_size,
        "shape": (len(scale), group_size),
        "scale": scale,
        "zero": zero,
        "packing": HQQ.bit_to_packing[bits],
        "view_as_float": False,
    }
    return HQQ.dequantize(packed, meta).to(dtype)


# How rows (rows, group_size) become tensors, and rows again.
_BACKENDS = {"quanto": (_quanto, _from_quanto), "hqq": (_hqq, _from_hqq)}
