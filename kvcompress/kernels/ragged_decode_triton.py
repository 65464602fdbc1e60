"""The Triton kernel of ragged decoding, over numbers, 8-bit floats or packed vectors. Import it only where triton is
installed.

Each segment is split over its keys (flash-decoding, https://pytorch.org/blog/flash-decoding/): a program attends with
the query heads of one KV head over one part of one segment and leaves its unnormalised output, maximum and sum; a
second kernel combines the parts.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .turboquant import TurboQuant
from .turboquant_triton import combine_back_triton, rotate_triton

MOST_KEYS = 64  # of a block
BLOCK_BYTES = 16384  # of a block of keys; the kernel then needs at most 83 KB of shared memory (fp32, sm_80)
MOST_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4
STAGES = 3  # blocks on their way to shared memory; Triton's default
FEW_CHANNELS_STAGES = 2  # whose rows are not aligned: with three, a register spills
PACKED_BYTES = 8192  # of a block of keys once it is unpacked, which needs registers
PACKED_STAGES = 1  # a block is loaded bit by bit: three stages would need 154 KB
WARPS = 4  # Triton's default
MORE_WARPS = 8  # with fewer, some blocks of fp32 spill registers


def ragged_decode_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    scaling: float,
    splits: int | None = None,
    codecs: tuple[TurboQuant, TurboQuant] | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    appended: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Arguments and result as in ragged_decode.py; fp16, bf16 or fp32, sums in fp32.

    Args:
        longest: the longest segment, in rows.
        splits: parts of each segment, a power of 2; None for as many as fill the device.
        codecs: of keys and values, where these are packed, uint8 (rows, nbytes): they are unpacked on the way.
        scales: of keys and values, where these are 8-bit floats, uint8 (rows, head_dim): see fp8.py.
        new: keys and values of a token, written on the way as the last entry of each segment; not packed.
        appended: entries of every segment behind its `lengths`, the new one included; LongTensor (1,) if only the
            device knows.
    """
    dims = keys.shape[1], values.shape[1]
    if codecs is not None:
        dims = codecs[0].dim, codecs[1].dim
        query = rotate_triton(query, codecs[0])
    bits = codecs[0].bits if codecs else 8 if scales else 0
    blocks = blocks_of(*dims, query.dtype, bool(bits))
    splits = splits or splits_of(starts.numel(), triton.cdiv(longest, blocks["BLOCK_KEYS"]), query.device)
    query = query.contiguous()
    parts = empty_parts(query, dims[1], splits)
    codebooks = scales or (query, query) if codecs is None else [codec.codebook for codec in codecs]  # read with bits
    segments = keys, values, starts, lengths, appended
    with torch.cuda.device_of(query):  # triton launches on the current device
        _attend_to(query, segments, dims, parts, splits, scaling, blocks, bits=bits, codebooks=codebooks, new=new)
        if codecs is None:
            return combined(query, parts, blocks)
        output = query.new_empty(*query.shape[:3], dims[1])
        combine_back_triton(*parts, codecs[1], output)
    return output


def few_channels_decode_triton(
    query: torch.Tensor,
    few: tuple,
    channels: torch.Tensor,
    all_: tuple,
    scaling: float,
    new: tuple[torch.Tensor, torch.Tensor] | None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attend to segments whose keys have some of the channels, and to others with all of them, as if they were one.

    Args:
        query: (batch, heads, 1, head_dim), fp16, bf16 or fp32; the result has the same shape.
        few, all_: keys and values (rows, their channels), starts and lengths, LongTensors (batch, kv_heads), the
            longest segment, and entries of every segment behind its length.
        channels: int16 (batch, kv_heads, channels), those that the keys of `few` have.
        new: as in `ragged_decode_triton`, of `all_`.
        splits: as in `ragged_decode_triton`, of both.
    """
    query, value_dim = query.contiguous(), all_[1].shape[1]
    blocks = blocks_of(query.shape[3], value_dim, query.dtype, False)
    if splits is None:
        wanted = triton.cdiv(max(few[4], all_[4]), blocks["BLOCK_KEYS"])
        splits = min(splits_of(channels[..., 0].numel(), wanted, query.device), MOST_SPLITS // 2)
    parts = empty_parts(query, value_dim, 2 * splits)
    fewer = few_blocks_of(channels.shape[2], value_dim, query.dtype)
    with torch.cuda.device_of(query):
        dims = channels.shape[2], value_dim
        segments = *few[:4], few[5]
        _attend_to(query, segments, dims, parts, splits, scaling, fewer, channels=channels.contiguous(), of=(0, 2))
        dims, segments = (query.shape[3], value_dim), (*all_[:4], all_[5])
        _attend_to(query, segments, dims, parts, splits, scaling, blocks, new=new, of=(1, 2))
        return combined(query, parts, blocks)


def empty_parts(query: torch.Tensor, value_dim: int, splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `_attend` leaves: outputs, maxima and sums of each query's parts."""
    rows = query.shape[0] * query.shape[1]
    maxima, sums = (torch.empty(rows, splits, device=query.device, dtype=torch.float32) for _ in range(2))
    return torch.empty(rows, splits, value_dim, device=query.device, dtype=torch.float32), maxima, sums


def _attend_to(
    query: torch.Tensor,
    segments: tuple,
    dims: tuple[int, int],
    parts: tuple[torch.Tensor, ...],
    splits: int,
    scaling: float,
    blocks: dict[str, int],
    bits: int = 0,
    codebooks: Sequence[torch.Tensor] | None = None,
    new: tuple[torch.Tensor, torch.Tensor] | None = None,
    channels: torch.Tensor | None = None,
    of: tuple[int, int] = (0, 1),
) -> None:
    """Launch `_attend` over keys, values, starts, lengths and appended entries; `of`: the how manieth of how many."""
    keys, values, starts, lengths, appended = segments
    groups = query.shape[1] // starts.shape[1]
    token = (query, query) if new is None else (part.contiguous() for part in new)  # not read without a token
    is_counted = isinstance(appended, torch.Tensor)
    _attend[(starts.numel(), splits)](
        query,
        keys,
        values,
        *(codebooks or (query, query)),
        *token,
        starts if channels is None else channels,
        starts,
        lengths,
        appended if is_counted else starts,
        0 if is_counted else appended,
        *parts,
        scaling,
        BITS=bits,
        APPENDS=new is not None,
        COUNTED=is_counted,
        CHOOSES=channels is not None,
        PART=of[0],
        PARTS=of[1],
        GROUPS=groups,
        QUERY_DIM=query.shape[3],
        KEY_DIM=dims[0],
        VALUE_DIM=dims[1],
        BLOCK_GROUPS=max(16, triton.next_power_of_2(groups)),
        **blocks,
    )


def combined(query: torch.Tensor, parts: tuple, blocks: dict[str, int]) -> torch.Tensor:
    """Return the output of the parts, (batch, heads, 1, value_dim)."""
    rows, splits, value_dim = parts[0].shape
    output = query.new_empty(*query.shape[:3], value_dim)
    of_value = {"VALUE_DIM": value_dim, "BLOCK_VALUE_DIM": blocks["BLOCK_VALUE_DIM"]}
    combine[(rows,)](*parts, output, SPLITS=splits, **of_value)
    return output


def blocks_of(key_dim: int, value_dim: int, dtype: torch.dtype, is_packed: bool) -> dict[str, int]:
    """Sizes of `_attend`'s blocks and its launch options.

    With them no register spills (`python -m benchmarks.gpu.offline`)."""
    block_key, block_value = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    fitting = (PACKED_BYTES if is_packed else BLOCK_BYTES) // (max(block_key, block_value) * dtype.itemsize)
    return {
        "BLOCK_KEY_DIM": block_key,
        "BLOCK_VALUE_DIM": block_value,
        "BLOCK_KEYS": min(max(fitting, 16), MOST_KEYS),  # a matrix product needs 16 of each dimension
        "num_stages": PACKED_STAGES if is_packed else STAGES,
        "num_warps": MORE_WARPS if is_packed and fitting < 16 else WARPS,
    }


def few_blocks_of(channels: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return `blocks_of` keys with some of the channels."""
    warps = MORE_WARPS if dtype == torch.float32 else WARPS
    blocks = blocks_of(channels, value_dim, dtype, False)
    return {**blocks, "num_stages": FEW_CHANNELS_STAGES, "num_warps": warps}


def splits_of(segments: int, blocks: int, device: torch.device) -> int:
    """Enough programs for every processor, but hardly more than the longest segment has `blocks`; a power of 2, so that
    growing segments compile few kernels."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = min(PROGRAMS_PER_PROCESSOR * processors // segments, blocks, MOST_SPLITS)
    return triton.next_power_of_2(max(1, wanted))


@triton.jit
def _vectors(stored, codebook, at, dim, is_entry, is_dim, BITS: tl.constexpr, DIM: tl.constexpr):
    """The numbers `dim` of the rows `at`, of which one is a column and the other a row; unpacked where there are bits
    (turboquant.py has the layout), or scaled where there are 8 (fp8.py)."""
    if BITS == 0:
        vectors = tl.load(stored + at * DIM + dim, mask=is_entry & is_dim, other=0.0)
    elif BITS == 8:
        byte = tl.load(stored + at * DIM + dim, mask=is_entry & is_dim, other=0).to(tl.int32)
        # As the bits of a half, whose exponent has 8 more of bias. Bits, since not every device has these floats.
        half = ((byte & 128) << 8 | (byte & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True)
        number = tl.where((byte & 127) == 127, float("nan"), half.to(tl.float32) * 256)
        vectors = number * tl.load(codebook)
    else:
        eights: tl.constexpr = (DIM + 7) // 8
        width: tl.constexpr = 2 if BITS == 3 else BITS  # of the first string of bits
        row = stored + at * (BITS * eights + 2)
        string = tl.load(row + dim * width // 8, mask=is_entry & is_dim, other=0).to(tl.int32)
        code = string >> (dim * width % 8) & (2**width - 1)
        if BITS == 3:
            high = tl.load(row + 2 * eights + dim // 8, mask=is_entry & is_dim, other=0).to(tl.int32)
            code = code | (high >> (dim % 8) & 1) << 2
        low = tl.load(row + BITS * eights, mask=is_entry, other=0).to(tl.int16)
        high = tl.load(row + BITS * eights + 1, mask=is_entry, other=0).to(tl.int16)
        norm = (low | high << 8).to(tl.float16, bitcast=True)
        vectors = tl.where(is_dim, tl.load(codebook + code) * norm.to(tl.float32), 0.0)
    return vectors


@triton.jit
def attended(q, k, v, is_entry, scaling, maximum, total, output):
    """The maxima and sums of a softmax over more keys, (key_dim, keys), and the output, not yet divided by the sums."""
    logits = tl.where(is_entry, tl.dot(q, k, input_precision="ieee") * scaling, float("-inf"))
    higher = tl.maximum(maximum, tl.max(logits, 1))
    weights = tl.exp(logits - higher[:, None])
    shrink = tl.exp(maximum - higher)
    output = output * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), output


@triton.jit(do_not_specialize=["behind"])
def _attend(
    query,  # (segments * GROUPS, QUERY_DIM)
    keys,  # (rows, KEY_DIM), or packed
    values,  # (rows, VALUE_DIM), or packed
    key_codebook,  # (2 ** BITS,); with 8 bits a scale, (1,)
    value_codebook,
    new_keys,  # (segments, KEY_DIM), which are written behind the segments
    new_values,  # (segments, VALUE_DIM)
    channels,  # (segments, KEY_DIM), which of the query's the keys have
    starts,  # (segments,)
    lengths,  # (segments,)
    appended,  # (1,), more entries of every segment, the new one included
    behind,  # the same, from the host
    partial,  # out: (segments * GROUPS, PARTS * splits, VALUE_DIM), not yet divided by the sums
    maxima,  # out: (segments * GROUPS, PARTS * splits)
    sums,  # out: (segments * GROUPS, PARTS * splits)
    scaling,
    BITS: tl.constexpr,  # of a number; 0 for numbers that are not packed
    APPENDS: tl.constexpr,  # whether there is a new token
    COUNTED: tl.constexpr,  # whether `appended` is given
    CHOOSES: tl.constexpr,  # whether `channels` is given
    PART: tl.constexpr,  # of PARTS launches that are combined
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    segment, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start, length = tl.load(starts + segment), tl.load(lengths + segment) + behind
    if COUNTED:
        length += tl.load(appended)
    if APPENDS:
        length -= 1
    part = tl.cdiv(tl.cdiv(length, splits), BLOCK_KEYS) * BLOCK_KEYS
    first = split * part
    end = tl.minimum(first + part, length)

    group = tl.arange(0, BLOCK_GROUPS)
    row = segment * GROUPS + group
    key_dim, value_dim = tl.arange(0, BLOCK_KEY_DIM), tl.arange(0, BLOCK_VALUE_DIM)
    is_group, is_key_dim, is_value_dim = group < GROUPS, key_dim < KEY_DIM, value_dim < VALUE_DIM
    channel = key_dim
    if CHOOSES:
        channel = tl.load(channels + segment * KEY_DIM + key_dim, mask=is_key_dim, other=0)
    q = tl.load(query + row[:, None] * QUERY_DIM + channel, mask=is_group[:, None] & is_key_dim, other=0.0)

    maximum = tl.full((BLOCK_GROUPS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_GROUPS,), tl.float32)
    output = tl.zeros((BLOCK_GROUPS, BLOCK_VALUE_DIM), tl.float32)
    for block in range(first, end, BLOCK_KEYS):
        entry = block + tl.arange(0, BLOCK_KEYS)
        is_entry = entry < end
        at = start + entry
        k = _vectors(
            keys, key_codebook, at[None, :], key_dim[:, None], is_entry[None, :], is_key_dim[:, None], BITS, KEY_DIM
        ).to(q.dtype)
        v = _vectors(
            values, value_codebook, at[:, None], value_dim[None, :], is_entry[:, None], is_value_dim[None, :], BITS,
            VALUE_DIM,
        ).to(q.dtype)  # fmt: skip
        maximum, total, output = attended(q, k, v, is_entry, scaling, maximum, total, output)

    if APPENDS:  # noqa: SIM102, of which one is known to the compiler
        if split == 0:  # nobody reads the new entry from the buffer
            new_key = tl.load(new_keys + segment * KEY_DIM + key_dim, mask=is_key_dim, other=0.0)
            new_value = tl.load(new_values + segment * VALUE_DIM + value_dim, mask=is_value_dim, other=0.0)
            tl.store(keys + (start + length) * KEY_DIM + key_dim, new_key, mask=is_key_dim)
            tl.store(values + (start + length) * VALUE_DIM + value_dim, new_value, mask=is_value_dim)
            logit = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scaling
            higher = tl.maximum(maximum, logit)
            weight, shrink = tl.exp(logit - higher), tl.exp(maximum - higher)
            output = output * shrink[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]
            total = total * shrink + weight
            maximum = higher

    place = (row * PARTS + PART) * splits + split
    tl.store(partial + place[:, None] * VALUE_DIM + value_dim, output, mask=is_group[:, None] & is_value_dim)
    tl.store(maxima + place, maximum, mask=is_group)
    tl.store(sums + place, total, mask=is_group)


@triton.jit
def combine(
    partial,  # (rows, SPLITS, VALUE_DIM)
    maxima,  # (rows, SPLITS), -inf where a part had no keys
    sums,  # (rows, SPLITS)
    output,  # out: (rows, VALUE_DIM)
    SPLITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
):
    row = tl.program_id(0)
    place, dim = row * SPLITS + tl.arange(0, SPLITS), tl.arange(0, BLOCK_VALUE_DIM)
    maximum = tl.load(maxima + place)
    weight = tl.exp(maximum - tl.max(maximum, 0))
    total = tl.sum(weight * tl.load(sums + place), 0)
    parts = tl.load(partial + place[:, None] * VALUE_DIM + dim, mask=(dim < VALUE_DIM)[None, :], other=0.0)
    result = tl.sum(weight[:, None] * parts, 0) / total
    tl.store(output + row * VALUE_DIM + dim, result.to(output.dtype.element_ty), mask=dim < VALUE_DIM)
