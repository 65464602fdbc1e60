"""TurboQuant (https://arxiv.org/abs/2504.19874), algorithm 1: two to four bits per number, without calibration.

A random rotation makes the coordinates of any vector alike: those of a random point of the unit sphere, nearly
independent of each other. Each is rounded to the nearest number of a codebook that is the best for that distribution
(Lloyd-Max); the vector's norm stands beside. A vector is packed without knowing any other, so a token is quantized
once, when it is stored.

As the rotation is orthogonal, attention needs no vector turned back: queries are rotated, and the output is.
"""

from functools import cache

import numpy as np
import torch

from ..device import on_device

STRINGS = {2: (2, 0), 3: (2, 1), 4: (4, 0)}  # the bits of a code in its first string and in its second
BITS = tuple(STRINGS)
NORM_BYTES = 2  # a norm is stored in fp16
SEED = 0  # of the rotation
CODES_PER_BYTE = 8  # of each bit of the codes: a string has whole bytes for every eight numbers
GRID = 40_001  # points of [-1, 1] at which the distribution is known
TOLERANCE = 1e-9  # of a codebook's numbers


class TurboQuant:
    """Packs vectors of `dim` numbers into bytes: the codes, then the norm.

    Codes are a string of bits, those of the first number lowest in the first byte. Codes of three bits are two such
    strings: of their two low bits, then of their high bit. A string has whole bytes for every eight numbers.

    Attributes:
        nbytes: of a packed vector.
        rotation: fp32 (dim, dim), orthogonal.
        codebook: fp32 (2 ** bits,), ascending.
        boundaries: fp32 (2 ** bits - 1,), halfway between two of its numbers.
    """

    def __init__(self, dim: int, bits: int, device: torch.device):
        self.dim, self.bits = dim, bits
        self.code_bytes = bits * -(-dim // CODES_PER_BYTE)
        self.nbytes = self.code_bytes + NORM_BYTES
        self.rotation = on_device(rotation(dim), device)
        self.codebook = on_device(codebook(dim, bits), device)
        self.boundaries = (self.codebook[1:] + self.codebook[:-1]) / 2
        low, high = STRINGS[bits]
        self._strings = [_BitString(low, 0, device), *([_BitString(high, low, device)] if high else [])]

    def pack(self, vectors: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> uint8 (..., nbytes)."""
        vectors = vectors.float()
        norms = vectors.norm(dim=-1, keepdim=True)
        unit = vectors / norms.clamp(min=torch.finfo(torch.float32).tiny)
        codes = torch.bucketize(self.rotate(unit), self.boundaries, out_int32=True).to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, -self.dim % CODES_PER_BYTE))
        stored = norms.clamp(max=torch.finfo(torch.float16).max).to(torch.float16).contiguous().view(torch.uint8)
        return torch.cat([*(string.pack(codes) for string in self._strings), stored], dim=-1)

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 (..., nbytes) -> (..., dim), still rotated."""
        *strings, norms = packed.split([*(self.code_bytes // self.bits * each.bits for each in self._strings), 2], -1)
        parts = [string.unpack(part) for string, part in zip(self._strings, strings, strict=True)]
        codes = sum(parts[1:], start=parts[0])[..., : self.dim]
        # On a CPU ten times as fast as indexing.
        units = self.codebook.to(dtype).index_select(0, codes.flatten().int()).view(codes.shape)
        norms = norms.clone(memory_format=torch.contiguous_format)  # a view may begin at an odd byte
        return units * norms.view(torch.float16).to(dtype)

    def rotate(self, vectors: torch.Tensor) -> torch.Tensor:
        """(..., dim), in its dtype."""
        return (vectors.float() @ self.rotation.T).to(vectors.dtype)

    def rotate_back(self, vectors: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`."""
        return (vectors.float() @ self.rotation).to(vectors.dtype)


class _BitString:
    """`bits` bits of each code, from the bit `first` on; a string has 1, 2 or 4 of each."""

    def __init__(self, bits: int, first: int, device: torch.device):
        self.bits, self.first = bits, first
        self.shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=device)

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 (..., numbers) -> uint8 (..., numbers * bits / 8)."""
        part = (codes >> self.first) & (2**self.bits - 1)
        return (part.unflatten(-1, (-1, len(self.shifts))) << self.shifts).sum(-1, dtype=torch.uint8)

    def unpack(self, string: torch.Tensor) -> torch.Tensor:
        """The inverse of `pack`, with zeros for the other bits."""
        return ((string.unsqueeze(-1) >> self.shifts & (2**self.bits - 1)) << self.first).flatten(-2)


@cache
@torch.inference_mode(False)  # a later call may have gradients
def codec(dim: int, bits: int, device: torch.device) -> TurboQuant:
    """The one that all layers share: nothing is sent to the device again."""
    return TurboQuant(dim, bits, device)


@cache
def rotation(dim: int) -> torch.Tensor:
    """A random orthogonal matrix (dim, dim), evenly distributed over all of them, fp32; the same for each `dim`."""
    gaussian = torch.randn(dim, dim, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).float().contiguous()


@cache
def codebook(dim: int, bits: int) -> torch.Tensor:
    """The 2 ** bits numbers with the least mean squared error for a coordinate of a random unit vector of `dim`
    numbers, whose density is (1 - x^2) ^ ((dim - 3) / 2) up to a factor (lemma 1): fp32, ascending."""
    x = np.linspace(-1, 1, GRID)
    with np.errstate(divide="ignore"):
        density = (1 - x**2) ** ((dim - 3) / 2)
    density[~np.isfinite(density)] = 0  # at the ends, for dim = 2
    mass, moment = density.cumsum(), (density * x).cumsum()
    numbers = np.interp((np.arange(2**bits) + 0.5) / 2**bits, mass / mass[-1], x)  # quantiles, to begin with
    change = np.inf
    while change > TOLERANCE:
        inner = (numbers[1:] + numbers[:-1]) / 2
        edges = np.concatenate([[-1.0], inner, [1.0]])
        means = np.diff(np.interp(edges, x, moment)) / np.diff(np.interp(edges, x, mass))
        change = np.abs(means - numbers).max()
        numbers = means
    return torch.from_numpy((numbers - numbers[::-1]) / 2).float()  # symmetric, up to the grid


def turboquant_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    key_codec: TurboQuant,
    value_codec: TurboQuant,
    scaling: float,
) -> torch.Tensor:
    """Attention of one token's queries (batch, heads, 1, dim) over packed keys and values (batch, kv_heads, entries,
    nbytes), in plain torch; the result has the shape of `query`. `visible`: bool (batch, 1 or kv_heads, entries)."""
    kv_heads = keys.shape[1]
    packed = key_codec.rotate(query).reshape(len(query), kv_heads, -1, query.shape[3])
    output = torch.nn.functional.scaled_dot_product_attention(
        packed,
        key_codec.unpack(keys, query.dtype),
        value_codec.unpack(values, query.dtype),
        attn_mask=None if visible is None else visible[:, :, None],
        scale=scaling,
    )
    return value_codec.rotate_back(output).reshape(*query.shape[:3], value_codec.dim)
