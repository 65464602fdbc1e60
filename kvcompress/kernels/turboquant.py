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

BITS = (2, 3, 4)
NORM_BYTES = 2  # a norm is stored in fp16
SEED = 0  # of the rotation
CODES_PER_BYTE = 8  # of each bit of the codes
GRID = 40_001  # points of [-1, 1] at which the distribution is known
TOLERANCE = 1e-9  # of a codebook's numbers


class TurboQuant:
    """Packs vectors of `dim` numbers into bytes: each bit of all codes in turn, then the norm.

    Attributes:
        nbytes: of a packed vector.
        rotation: fp32 (dim, dim), orthogonal.
        codebook: fp32 (2 ** bits,), ascending.
    """

    def __init__(self, dim: int, bits: int, device: torch.device):
        self.dim, self.bits = dim, bits
        self.code_bytes = bits * -(-dim // CODES_PER_BYTE)
        self.nbytes = self.code_bytes + NORM_BYTES
        self.rotation = rotation(dim).to(device)
        self.codebook = codebook(dim, bits).to(device)
        self._boundaries = (self.codebook[1:] + self.codebook[:-1]) / 2
        self._shifts = torch.arange(CODES_PER_BYTE, dtype=torch.uint8, device=device)
        self._planes = torch.arange(bits, dtype=torch.uint8, device=device)[:, None, None]
        # byte -> its bits, lowest first, each in a byte of an int64
        bits = torch.arange(256, dtype=torch.uint8, device=device)[:, None] >> self._shifts & 1
        self._spread = bits.contiguous().view(torch.int64).flatten()

    def pack(self, vectors: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> uint8 (..., nbytes)."""
        vectors = vectors.float()
        norms = vectors.norm(dim=-1, keepdim=True)
        unit = vectors / norms.clamp(min=torch.finfo(torch.float32).tiny)
        codes = torch.bucketize(self.rotate(unit), self._boundaries, out_int32=True).to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, -self.dim % CODES_PER_BYTE)).unflatten(-1, (-1, CODES_PER_BYTE))
        planes = ((codes.unsqueeze(-3) >> self._planes & 1) << self._shifts).sum(-1, dtype=torch.uint8).flatten(-2)
        stored = norms.clamp(max=torch.finfo(torch.float16).max).to(torch.float16).contiguous().view(torch.uint8)
        return torch.cat([planes, stored], dim=-1)

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 (..., nbytes) -> (..., dim), still rotated."""
        planes = packed[..., : self.code_bytes].unflatten(-1, (self.bits, -1))
        spread = self._spread.index_select(0, planes.flatten().int()).view(planes.shape)
        eight = spread[..., 0, :]  # codes in each number
        for bit in range(1, self.bits):
            eight = eight | spread[..., bit, :] << bit
        norms = packed[..., self.code_bytes :].contiguous().view(torch.float16)
        codes = eight.contiguous().view(torch.uint8)[..., : self.dim]
        # On a CPU ten times as fast as indexing.
        units = self.codebook.to(dtype).index_select(0, codes.flatten().int()).view(codes.shape)
        return units * norms.to(dtype)

    def rotate(self, vectors: torch.Tensor) -> torch.Tensor:
        """(..., dim), in its dtype."""
        return (vectors.float() @ self.rotation.T).to(vectors.dtype)

    def rotate_back(self, vectors: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`."""
        return (vectors.float() @ self.rotation).to(vectors.dtype)


@cache
def codec(dim: int, bits: int, device: torch.device) -> TurboQuant:
    """The one that all layers share: nothing is sent to the device again."""
    return TurboQuant(dim, bits, device)


@cache
def rotation(dim: int) -> torch.Tensor:
    """A random orthogonal matrix (dim, dim), evenly distributed over all of them, fp32; the same for each `dim`."""
    gaussian = torch.randn(dim, dim, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).float()


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
