"""Low-bit storage of states: which bits each backend offers, and groups of consecutive numbers that share a scale and a
zero, through optimum-quanto or hqq. `turboquant.py` is our own backend."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import KVCompressError
from . import turboquant

BITS = {"quanto": (2, 4), "hqq": (1, 2, 4, 8), "turboquant": turboquant.BITS}
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
        rows = -(-flat.numel() // self.group_size)
        rows = -(-rows // ROWS_PER_BYTE) * ROWS_PER_BYTE
        # The filler repeats the last number, so that it does not widen a group's range.
        padded = flat.new_empty(rows * self.group_size)
        padded[: flat.numel()] = flat
        padded[flat.numel() :] = flat[-1:]
        tensors, restore = _BACKENDS[self.backend](padded.view(rows, self.group_size), self.bits)
        return Quantized(states.shape, tensors, restore)


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor: its shape, the tensors that it takes in memory, and how to get it back (what can be pickled).
    It never changes, so that copies of a cache share it."""

    shape: torch.Size
    tensors: list[torch.Tensor]
    restore: Callable[[], torch.Tensor]

    def dequantize(self) -> torch.Tensor:
        return self.restore().reshape(-1)[: self.shape.numel()].view(self.shape)

    def __deepcopy__(self, memo: dict[int, object]) -> "Quantized":
        return self


def _quanto(rows: torch.Tensor, bits: int) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
    from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight

    qtype = {2: qint2, 4: qint4}[bits]
    scale, shift = MaxOptimizer()(rows, qtype, 0, None)
    packed = quantize_weight(rows, qtype, 0, scale, shift, None)
    return [packed._data._data, packed._scale, packed._shift], packed.dequantize


def _hqq(rows: torch.Tensor, bits: int) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
    from hqq.core.quantize import Quantizer as HQQ

    packed, meta = HQQ.quantize(
        rows, nbits=bits, axis=1, group_size=rows.shape[1], device=str(rows.device), compute_dtype=rows.dtype
    )
    return [packed, meta["scale"], meta["zero"]], partial(_from_hqq, packed, meta, rows.dtype)


def _from_hqq(packed: torch.Tensor, meta: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    from hqq.core.quantize import Quantizer as HQQ

    return HQQ.dequantize(packed, meta).to(dtype)


_BACKENDS: dict[str, Any] = {"quanto": _quanto, "hqq": _hqq}
