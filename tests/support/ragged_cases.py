"""Ragged entries for tests, and checks of the Triton kernel against the plain reference."""

import random
from collections.abc import Callable

import torch

from kvcompress.kernels import fp8
from kvcompress.kernels.ragged_decode import ragged_decode_reference
from kvcompress.kernels.turboquant import BITS, TurboQuant
from kvcompress.scoring.layer_view import Kept

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# batch, kv_heads, groups, head_dim, longest, spare, splits
SHAPES = [
    (1, 1, 1, 16, 1, 0, 1),  # one entry
    (2, 2, 3, 80, 130, 7, 4),  # a head_dim that is no power of two; several blocks, parts without keys
    (1, 2, 7, 128, 70, 1, 2),
    (2, 1, 2, 64, 90, 32, 1),
    (1, 1, 20, 33, 70, 3, 2),  # more query heads per KV head than a block of 16
]


def ragged_case(batch, kv_heads, groups, head_dim, most, spare, dtype, seed=0, device="cpu") -> tuple:
    """Return arguments of `ragged_decode` up to `sizes`: segments of 1 to `most` entries, one of each; NaN in spare
    rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, most + 1, (batch, kv_heads), generator=generator)
    lengths[0, 0], lengths[-1, -1] = most, 1
    flat = lengths.flatten()
    ends = (flat + spare).cumsum(0)
    starts = ends - spare - flat
    keys, values = torch.full((2, int(ends[-1]), head_dim), float("nan"))
    for start, length in zip(starts.tolist(), flat.tolist(), strict=True):
        keys[start : start + length] = torch.randn(length, head_dim, generator=generator)
        values[start : start + length] = torch.randn(length, head_dim, generator=generator)
    query = torch.randn(batch, kv_heads * groups, 1, head_dim, generator=generator)
    states = [part.to(device, dtype) for part in (query, keys, values)]
    sizes = [rows for length in flat.tolist() for rows in (length, spare)]
    return *states, starts.view_as(lengths).to(device), lengths.to(device), sizes


def check_triton(dtype: torch.dtype, device: str, shapes: list[tuple] = SHAPES) -> None:
    from kvcompress.kernels.ragged_decode_triton import ragged_decode_triton

    for batch, kv_heads, groups, head_dim, most, spare, splits in shapes:
        *case, sizes = ragged_case(batch, kv_heads, groups, head_dim, most, spare, dtype, device=device)
        expected = ragged_decode_reference(*case, head_dim**-0.5)
        output = ragged_decode_triton(*case, max(sizes[::2]), head_dim**-0.5, splits)
        torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def check_few_channels_triton(dtype: torch.dtype, device: str, shapes: list[tuple] = SHAPES) -> None:
    """Check attention to keys with some of the channels, and to others, against that to the same with zeros."""
    from kvcompress.kernels.ragged_decode_triton import few_channels_decode_triton

    for batch, kv_heads, groups, head_dim, most, spare, splits in shapes:
        case = batch, kv_heads, groups, head_dim, most, spare, dtype
        (query, keys, values, *places, _), (_, all_keys, all_values, *all_places, _) = (
            ragged_case(*case, seed=seed, device=device) for seed in (0, 1)
        )
        values, all_values = (part[:, : head_dim - 3].contiguous() for part in (values, all_values))
        channels = torch.rand(batch, kv_heads, head_dim, generator=torch.Generator().manual_seed(0)).argsort(-1)
        channels = channels[..., : head_dim * 2 // 3].sort().values.to(device)
        few_keys, joined, latest = keys[:, : channels.shape[2]] * float("nan"), [], []
        for own, *segments in zip(*(part.flatten(0, 1) for part in (channels, *places, *all_places)), strict=True):
            start, length, all_start, all_length = map(int, segments)
            few, every = slice(start, start + length), slice(all_start, all_start + all_length)
            few_keys[few] = keys[few][:, own]
            zeroed = torch.zeros_like(keys[few]).index_copy_(1, own, few_keys[few])
            joined += [(zeroed, values[few]), (all_keys[every].clone(), all_values[every].clone())]
            latest.append(every.stop - 1)
        together = [torch.cat(parts) for parts in zip(*joined, strict=True)]
        lengths = places[1] + all_places[1]
        starts = lengths.flatten().cumsum(0).view_as(lengths) - lengths
        scaling = head_dim**-0.5
        expected = ragged_decode_reference(query, *together, starts, lengths, scaling)
        new = tuple(part[latest].view(batch, kv_heads, 1, -1) for part in (all_keys, all_values))
        for part in (all_keys, all_values):
            part[latest] = float("nan")  # written on the way
        for token in (new, None):
            few, every = (few_keys, values, *places, most, 0), (all_keys, all_values, *all_places, most, 0)
            output = few_channels_decode_triton(query, few, channels.short(), every, scaling, token, splits)
            torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def check_layout_triton(dtype: torch.dtype, device: str) -> None:
    """Check that entries are laid out as segments and returned as by `RaggedStorage` on a CPU."""
    from kvcompress.cache.storage.ragged import RaggedStorage
    from kvcompress.kernels.ragged_layout_triton import from_segments, to_segments

    for batch, kv_heads, key_dim, value_dim, room, appended in [(1, 1, 16, 16, 0, 0), (2, 3, 33, 80, 5, 3)]:
        slots, generator = 90, torch.Generator().manual_seed(0)
        counts = torch.randint(0, slots + 1, (batch, kv_heads), generator=generator)
        counts[0, 0], counts[-1, -1] = 0, slots
        columns = torch.arange(7, 7 + slots).expand(batch, kv_heads, -1)
        columns = columns.masked_fill(torch.arange(slots) < slots - counts[..., None], -1)
        states = [
            (100 * torch.randn(batch, kv_heads, slots + appended, dim, generator=generator)).to(dtype)
            for dim in (key_dim, value_dim)
        ]
        total, dense = int(counts.sum()), (*(part[:, :, :slots] for part in states), columns)
        storage = RaggedStorage(Kept(*dense), counts, counts.flatten().tolist(), room)
        *laid, starts = to_segments(*(part.to(device) for part in dense), counts.to(device), total, room)
        expected = *storage.segments()[:2], storage.indices, storage.starts
        for ours, theirs in zip((*laid, starts), expected, strict=True):
            assert torch.equal(ours.cpu(), theirs)
        if appended:
            storage.append(*(part[:, :, slots:] for part in states))
        ragged = storage.keys, storage.values, storage.indices, storage.starts, storage.lengths
        numbers = storage.behind, storage.appended, storage.room, 200, storage.length
        expected, found = storage.kept(200), from_segments(*(part.to(device) for part in ragged), *numbers)
        used = expected.indices >= 0
        assert torch.equal(found[2].cpu(), expected.indices)
        for ours, theirs in zip(found, (expected.keys, expected.values), strict=False):
            assert torch.equal(ours.cpu()[used], theirs[used])
            assert not ours.cpu()[~used].any()


def check_turboquant_triton(dtype: torch.dtype, device: str, shapes: list[tuple] = SHAPES) -> None:
    """Check attention to packed entries in place against attention to the same entries unpacked."""
    from kvcompress.kernels.ragged_decode_triton import ragged_decode_triton

    for bits in BITS:
        for batch, kv_heads, groups, head_dim, most, spare, splits in shapes:
            query, keys, values, starts, lengths, sizes = ragged_case(
                batch, kv_heads, groups, head_dim, most, spare, dtype, device=device
            )
            codec = TurboQuant(head_dim, bits, query.device)
            packed = codec.pack(keys.nan_to_num()), codec.pack(values.nan_to_num())
            unpacked = (codec.rotate_back(codec.unpack(part, torch.float32)).to(dtype) for part in packed)
            expected = ragged_decode_reference(query, *unpacked, starts, lengths, head_dim**-0.5)
            longest, scaling = max(sizes[::2]), head_dim**-0.5
            output = ragged_decode_triton(query, *packed, starts, lengths, longest, scaling, splits, (codec, codec))
            tolerance = 4 * TOLERANCE[dtype]  # the rotated query is rounded too
            torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


def check_turboquant_pack_triton(dtype: torch.dtype, device: str, shapes: list[tuple] = SHAPES) -> None:
    """Tokens packed behind segments: bytes as the plain reference packs them, but for a few codes that rounding moves;
    other rows stay."""
    from kvcompress.kernels.turboquant_triton import pack_behind_triton

    for bits in BITS:
        for batch, kv_heads, _, head_dim, most, *_ in shapes:
            generator = torch.Generator().manual_seed(bits)
            codecs = tuple(TurboQuant(dim, bits, torch.device(device)) for dim in (head_dim, 48))
            ends = (torch.arange(batch * kv_heads) * (most + 3)).to(device)
            parts = [torch.randn(batch, kv_heads, most, codec.dim, generator=generator) for codec in codecs]
            parts[0][0, 0, 0] = 0
            parts = [part.to(device, dtype) for part in parts]
            stored = [torch.full((len(ends) * (most + 3), codec.nbytes), 7, device=device) for codec in codecs]
            stored = [each.to(torch.uint8) for each in stored]
            pack_behind_triton(*stored, ends - 2, 2, *parts, codecs)
            for part, codec, found in zip(parts, codecs, stored, strict=True):
                found = found.view(batch, kv_heads, most + 3, codec.nbytes)
                assert (found[:, :, most:] == 7).all()
                expected = codec.pack(part)
                differing = (found[:, :, :most] != expected).float().mean()
                assert differing < 1e-3 if expected.numel() > 1e3 else differing == 0
                vectors = (codec.unpack(bytes_, torch.float32) for bytes_ in (found[:, :, :most], expected))
                step = (codec.codebook[1:] - codec.codebook[:-1]).max()
                norms = part.float().norm(dim=-1, keepdim=True)
                assert ((next(vectors) - next(vectors)).abs() <= 1.01 * step * norms).all()


def check_fp8_triton(dtype: torch.dtype, device: str, shapes: list[tuple] = SHAPES) -> None:
    """Check attention to 8-bit floats in place against attention to the same entries read back."""
    from kvcompress.kernels.ragged_decode_triton import ragged_decode_triton

    for batch, kv_heads, groups, head_dim, most, spare, splits in shapes:
        query, keys, values, starts, lengths, sizes = ragged_case(
            batch, kv_heads, groups, head_dim, most, spare, dtype, device=device
        )
        scales = tuple(fp8.scale_of(part.nan_to_num()) * factor for part, factor in ((keys, 1.0), (values, 0.8)))
        packed = [fp8.pack(part, scale) for part, scale in zip((keys, values), scales, strict=True)]  # NaN stays NaN
        read = [fp8.unpack(part, scale, dtype) for part, scale in zip(packed, scales, strict=True)]
        expected = ragged_decode_reference(query, *read, starts, lengths, head_dim**-0.5)
        longest, scaling = max(sizes[::2]), head_dim**-0.5
        output = ragged_decode_triton(query, *packed, starts, lengths, longest, scaling, splits, scales=scales)
        torch.testing.assert_close(output, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def check_fp8_pack_triton(dtype: torch.dtype, device: str) -> None:
    """Check that tokens packed behind segments have the bytes that PyTorch gives them, NaN, infinity, zeros of both
    signs, the least numbers and those between two 8-bit floats included; other rows stay."""
    from kvcompress.kernels.fp8_triton import pack_behind_triton

    steps = fp8.unpack(torch.arange(256, dtype=torch.uint8), torch.ones(()), torch.float32)
    steps = steps[steps.isfinite()].sort().values
    halfway = (steps[1:] + steps[:-1]) / 2
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-30, -1e-5, 447, 448, 465, -1e4])
    numbers = torch.cat([steps, halfway, halfway * 1.001, halfway * 0.999, special])
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 0.37):
        scales = torch.tensor(scale, device=device), torch.tensor(3 * scale, device=device)
        parts = [
            numbers[torch.randint(len(numbers), (2, 3, 60, dim), generator=generator)] * scale for dim in (33, 128)
        ]
        parts[1].view(-1)[: len(numbers)] = 3 * scale * numbers
        parts = [part.to(device, dtype) for part in parts]
        ends = (torch.arange(6) * 70).to(device)
        stored = [torch.full((6 * 70, part.shape[3]), 7, dtype=torch.uint8, device=device) for part in parts]
        pack_behind_triton(*stored, ends, 5, *parts, scales)
        for part, of_part, found in zip(parts, scales, stored, strict=True):
            found = found.view(2, 3, 70, -1)
            assert torch.equal(found[:, :, 5:65], fp8.pack(part, of_part))
            assert (found[:, :, :5] == 7).all()
            assert (found[:, :, 65:] == 7).all()


def static_case(batch, kv_heads, groups, head_dim, capacity, dtype, seed=0, device="cpu") -> list:
    """Return arguments of `static_decode` up to `appended`: segments with 0 or more entries, followed by appended
    tokens.

    Everything that must not be read is NaN."""
    generator = torch.Generator().manual_seed(seed)
    appended = int(torch.randint(1, capacity + 1, (1,), generator=generator))
    entries = int(torch.randint(0, capacity - appended + 1, (1,), generator=generator))
    lengths = torch.randint(0, entries + 1, (batch, kv_heads), generator=generator)
    starts = torch.arange(batch * kv_heads).view(batch, kv_heads) * capacity + entries - lengths
    keys, values = torch.randn(2, batch, kv_heads, capacity, head_dim, generator=generator)
    slots = torch.arange(capacity)
    is_stored = (slots >= entries - lengths[..., None]) & (slots < entries + appended - 1)
    keys, values = (part.masked_fill(~is_stored[..., None], torch.nan) for part in (keys, values))
    query = torch.randn(batch, kv_heads * groups, 1, head_dim, generator=generator)
    new = torch.randn(2, batch, kv_heads, 1, head_dim, generator=generator)
    states = [part.to(device, dtype) for part in (query, *new, keys, values)]
    return [*states, starts.to(device), lengths.to(device), torch.tensor([appended], device=device)]


def check_static(attend: Callable[..., torch.Tensor], case: list) -> None:
    """Check `attend(*case, longest, scaling)` against the reference, with a new token and with a token already written.

    It must write that token and nothing else."""
    query, new_keys, new_values, keys, values, starts, lengths, appended = case
    longest, scaling, close = keys.shape[2], query.shape[3] ** -0.5, TOLERANCE[query.dtype]
    written, rows = [], (starts + lengths + appended - 1).flatten()
    for buffer, new in ((keys, new_keys), (values, new_values)):
        written.append(buffer.flatten(0, 2).index_copy(0, rows, new.flatten(0, 2)))
    expected = ragged_decode_reference(query, *written, starts, lengths + appended, scaling)
    torch.testing.assert_close(attend(*case, longest, scaling), expected, atol=close, rtol=close)
    for buffer, after in zip((keys, values), written, strict=True):
        torch.testing.assert_close(buffer.flatten(0, 2), after, atol=0, rtol=0, equal_nan=True)
    again = attend(query, None, None, *case[3:], longest, scaling)
    torch.testing.assert_close(again, expected, atol=close, rtol=close)


def check_static_triton(dtype: torch.dtype, device: str, count: int, splits: int | None = None) -> None:
    """Check the Triton kernel that also writes a token, over `count` drawn shapes."""
    from kvcompress.kernels.ragged_decode_triton import ragged_decode_triton

    def attend(query, new_keys, new_values, keys, values, starts, lengths, appended, longest, scaling):
        new = None if new_keys is None else (new_keys, new_values)
        appended = appended if on_device else int(appended)
        segments = keys.flatten(0, 2), values.flatten(0, 2), starts, lengths
        return ragged_decode_triton(query, *segments, longest, scaling, splits, new=new, appended=appended)

    draw = random.Random(0)
    for seed in range(count):
        on_device = draw.random() < 0.5
        heads = draw.randint(1, 3), draw.randint(1, 3), draw.choice([1, 2, 7, 8, 20])
        shape = *heads, draw.choice([64, 80, 96, 128, 256]), draw.choice([1, 30, 200, 300])
        check_static(attend, static_case(*shape, dtype, seed, device))
