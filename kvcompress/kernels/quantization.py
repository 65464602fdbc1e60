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
    """Packed numbers, scale and zero, (rows, 1) each: those of hqq's own `Quantizer.quantize`, which waits for the
    device once per step of its fit."""
    from hqq.core.quantize import Quantizer as HQQ

    numbers, most = rows.float(), 2**bits - 1
    least, extent = numbers.amin(1, keepdim=True), numbers.amax(1, keepdim=True)
    extent -= least
    scale = torch.where(extent.abs() <= 1e-4, 1.0, most / extent).clamp(max=2e4)
    scale, zero = _fitted(numbers, scale, -least * scale, most)
    codes = (numbers * scale + zero).round_().clamp_(0, most)
    return [HQQ.pack[HQQ.bit_to_packing[bits]](codes), 1.0 / scale, zero]


def _fitted(
    numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale, and the zero with which few numbers are far from what they become: HQQ's half-quadratic fit
    (https://mobiusml.github.io/hqq_blog/, p = 0.7), in hqq's dtype of the device.

    It ends where the error no longer falls. On CUDA the host does not wait to learn it: later steps change nothing."""
    on_cuda = numbers.device.type == "cuda"
    numbers, scale, zero = (each.to(torch.float16 if on_cuda else torch.float32) for each in (numbers, scale, zero))
    error, is_falling = torch.full((), torch.inf, device=numbers.device), None
    for _ in range(20):
        codes = torch.round(numbers * scale + zero).clamp_(0, most)
        missed = numbers - (codes - zero) / scale
        now = missed.abs().mean().float()
        far = missed.abs()
        far = far.sub_(0.1 * far.pow(0.7 - 1)).clamp_min_(0.0).mul_(missed.sign())
        fitted = (codes - (numbers - far) * scale).mean(1, keepdim=True)
        zero = fitted if is_falling is None else torch.where(is_falling, fitted, zero)
        falls = now < error
        is_falling = falls if is_falling is None else is_falling & falls
        error = torch.minimum(error, now)
        if not on_cuda and not bool(is_falling):
            break
    return scale, zero


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
