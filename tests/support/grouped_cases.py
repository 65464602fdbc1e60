"""Entries that share scales and zeros in groups, for tests: drawn without the packages that would quantize them."""

import torch

from kvcompress.kernels.pieces import Pieces, pieces
from kvcompress.kernels.quantization import ROWS_PER_BYTE, Quantized, Quantizer
from tests.support.ragged_cases import TOLERANCE

CODINGS = [("quanto", 4), ("quanto", 2), ("hqq", 8), ("hqq", 4), ("hqq", 2), ("hqq", 1)]
# batch, kv_heads, groups, key_dim, value_dim, most entries of each block, in full precision, group_size, splits
SHAPES = [
    (1, 1, 1, 16, 16, [1], 1, 64, 1),
    (2, 2, 3, 80, 48, [130, 20], 70, 16, 4),  # dims that are no power of two; parts without keys
    (1, 2, 20, 33, 64, [70], 0, 64, 2),  # more query heads per KV head than a block of 16; nothing waits
]


def drawn(
    shape: tuple[int, int], quantizer: Quantizer, dtype: torch.dtype, generator
) -> tuple[Quantized, torch.Tensor]:
    """Any codes, scales and zeros, and the numbers that they stand for, fp32."""
    bits, size = quantizer.bits, quantizer.group_size
    rows = -(-shape[0] * shape[1] // (size * ROWS_PER_BYTE)) * ROWS_PER_BYTE
    codes = torch.randint(0, 2**bits, (rows, size), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(rows, 1, generator=generator) * 3 / 2**bits).to(dtype)
    zero = torch.rand(rows, 1, generator=generator) * 2
    zero = (zero * 2**bits / 3 if quantizer.backend == "hqq" else zero).to(dtype)
    parts = codes.chunk(8 // bits)  # of a byte
    if quantizer.backend == "hqq":
        numbers, parts = (codes - zero.float()) * scale.float(), parts[::-1]
    else:
        numbers = codes * scale.float() - zero.float()
    packed = sum((part << bits * place for place, part in enumerate(parts)), start=torch.zeros_like(parts[0]))
    numbers = numbers.flatten()[: shape[0] * shape[1]].view(shape)
    return Quantized(torch.Size(shape), [packed, scale, zero], quantizer, dtype), numbers


def grouped_case(
    quantizer: Quantizer, batch, kv_heads, groups, key_dim, value_dim, most, recent, dtype, seed=0, device="cpu"
) -> tuple[tuple, torch.Tensor, list]:
    """Arguments of `grouped_decode` up to `recent`, what attention gives with a scaling of 0.2, and what has to
    outlive both. Heads keep 0 to `most` entries of each block, at least 1 of the first; NaN in the room behind
    `recent`."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, kv_heads * groups, 1, key_dim, generator=generator).to(device, dtype)
    waiting = [torch.randn(batch, kv_heads, recent, dim, generator=generator) for dim in (key_dim, value_dim)]
    room = [torch.full((batch, kv_heads, recent + 3, part.shape[3]), torch.nan, dtype=dtype) for part in waiting]
    for buffer, part in zip(room, waiting, strict=True):
        buffer[:, :, :recent] = part
    room = [buffer.to(device) for buffer in room]
    entries = [[[] for _ in range(kv_heads)] for _ in range(batch)]
    blocks, ends = [], []
    for longest in most:
        fewest = 0 if ends else 1
        counts = torch.randint(fewest, longest + 1, (batch, kv_heads), generator=generator)
        counts[:, 0] = longest
        ends.append(counts.cumsum(1))
        rows = []
        for row, held in enumerate(counts.tolist()):
            (keys, of_keys), (values, of_values) = (
                drawn(shape, quantizer, dtype, generator) for shape in ((key_dim, sum(held)), (sum(held), value_dim))
            )
            for part in (keys, values):
                part.tensors[:] = [tensor.to(device) for tensor in part.tensors]
            rows.append((keys, values))
            for head, pair in enumerate(zip(of_keys.T.split(held), of_values.split(held), strict=True)):
                entries[row][head].append(pair)
        blocks.append(rows)
    expected = torch.empty(*query.shape[:3], value_dim)
    for row in range(batch):
        for head in range(kv_heads * groups):
            kept = entries[row][head // groups]
            keys, values = (
                torch.cat([*(pair[which] for pair in kept), room[which][row, head // groups, :recent].float().cpu()])
                for which in (0, 1)
            )
            weights = (keys @ query[row, head, 0].float().cpu() * 0.2).softmax(0)
            expected[row, head, 0] = weights @ values
    found: Pieces = pieces(blocks, torch.stack(ends).to(device), sum(most))
    return (query, found, *room, recent), expected, blocks


def check_grouped_triton(dtype: torch.dtype, device: str, shapes: list[tuple] = SHAPES) -> None:
    from kvcompress.kernels.grouped_triton import grouped_decode_triton

    for backend, bits in CODINGS:
        for *sizes, group_size, splits in shapes:
            quantizer = Quantizer(backend, bits, group_size)
            case, expected, _blocks = grouped_case(quantizer, *sizes, dtype, seed=bits, device=device)
            output = grouped_decode_triton(*case, 0.2, splits)
            assert output.dtype == dtype
            close = TOLERANCE[dtype]
            torch.testing.assert_close(output.float().cpu(), expected, atol=close, rtol=close)


def check_hqq(bits: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check that what becomes of numbers is what hqq itself makes of them, which waits for the device in each step."""
    from hqq.core.quantize import Quantizer as HQQ

    generator = torch.Generator().manual_seed(bits)
    for power in (1, 3):
        rows = (torch.randn(64, 64, generator=generator) * torch.logspace(-3, 1, 64)[:, None]) ** power
        rows[3], rows[4], rows[5, 6] = 1.5, 0, 1e4
        rows = rows.to(device, dtype)
        options = {"axis": 1, "group_size": 64, "device": str(device), "compute_dtype": dtype}
        packed, meta = HQQ.quantize(rows, nbits=bits, **options)
        ours = Quantizer("hqq", bits, 64).quantize(rows).tensors
        for expected, found in zip([packed, meta["scale"], meta["zero"]], ours, strict=True):
            assert expected.dtype == found.dtype
            torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
