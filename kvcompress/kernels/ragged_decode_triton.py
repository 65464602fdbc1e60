"""The Triton kernel of ragged decoding. Import it only where triton is installed.

Each segment is split over its keys (flash-decoding, https://pytorch.org/blog/flash-decoding/): a program attends with
the query heads of one KV head over one part of one segment and leaves its unnormalised output, maximum and sum; a
second kernel combines the parts.
"""

import torch
import triton
import triton.language as tl

MOST_KEYS = 64  # of a block
BLOCK_BYTES = 16384  # of a block of keys; the kernel then needs at most 83 KB of shared memory (fp32, sm_80)
MOST_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4


def ragged_decode_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    scaling: float,
    splits: int | None = None,
) -> torch.Tensor:
    """Arguments and result as in ragged_decode.py; fp16, bf16 or fp32, sums in fp32.

    Args:
        longest: the longest segment, in rows.
        splits: parts of each segment, a power of 2; None for as many as fill the device.
    """
    segments, (key_dim, value_dim) = starts.numel(), (keys.shape[1], values.shape[1])
    groups = query.shape[1] // starts.shape[1]
    block_key, block_value = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    fitting = BLOCK_BYTES // (max(block_key, block_value) * keys.element_size())
    block_keys = min(MOST_KEYS, max(16, fitting))  # a matrix product needs 16 of each dimension
    splits = splits or _splits(segments, triton.cdiv(longest, block_keys), query.device)
    query = query.contiguous()
    output = query.new_empty(*query.shape[:3], value_dim)
    partial = torch.empty(segments * groups, splits, value_dim, device=query.device, dtype=torch.float32)
    maxima = torch.empty(segments * groups, splits, device=query.device, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    with torch.cuda.device_of(query):  # triton launches on the current device
        _attend[(segments, splits)](
            query,
            keys,
            values,
            starts,
            lengths,
            partial,
            maxima,
            sums,
            scaling,
            GROUPS=groups,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_GROUPS=max(16, triton.next_power_of_2(groups)),
            BLOCK_KEY_DIM=block_key,
            BLOCK_VALUE_DIM=block_value,
            BLOCK_KEYS=block_keys,
        )
        _combine[(segments * groups,)](
            partial, maxima, sums, output, SPLITS=splits, VALUE_DIM=value_dim, BLOCK_VALUE_DIM=block_value
        )
    return output


def _splits(segments: int, blocks: int, device: torch.device) -> int:
    """Enough programs for every processor, but hardly more than the longest segment has `blocks`; a power of 2, so that
    growing segments compile few kernels."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = min(PROGRAMS_PER_PROCESSOR * processors // segments, blocks, MOST_SPLITS)
    return triton.next_power_of_2(max(1, wanted))


@triton.jit
def _attend(
    query,  # (segments * GROUPS, KEY_DIM)
    keys,  # (rows, KEY_DIM)
    values,  # (rows, VALUE_DIM)
    starts,  # (segments,)
    lengths,  # (segments,)
    partial,  # out: (segments * GROUPS, splits, VALUE_DIM), not yet divided by the sums
    maxima,  # out: (segments * GROUPS, splits)
    sums,  # out: (segments * GROUPS, splits)
    scaling,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_KEY_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    segment, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start, length = tl.load(starts + segment), tl.load(lengths + segment)
    part = tl.cdiv(tl.cdiv(length, splits), BLOCK_KEYS) * BLOCK_KEYS
    first = split * part
    end = tl.minimum(first + part, length)

    group = tl.arange(0, BLOCK_GROUPS)
    row = segment * GROUPS + group
    key_dim, value_dim = tl.arange(0, BLOCK_KEY_DIM), tl.arange(0, BLOCK_VALUE_DIM)
    is_group, is_key_dim, is_value_dim = group < GROUPS, key_dim < KEY_DIM, value_dim < VALUE_DIM
    q = tl.load(query + row[:, None] * KEY_DIM + key_dim, mask=is_group[:, None] & is_key_dim, other=0.0)

    maximum = tl.full((BLOCK_GROUPS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_GROUPS,), tl.float32)
    output = tl.zeros((BLOCK_GROUPS, BLOCK_VALUE_DIM), tl.float32)
    for block in range(first, end, BLOCK_KEYS):
        entry = block + tl.arange(0, BLOCK_KEYS)
        is_entry = entry < end
        at = start + entry
        k = tl.load(keys + at * KEY_DIM + key_dim[:, None], mask=is_entry & is_key_dim[:, None], other=0.0)
        logits = tl.where(is_entry, tl.dot(q, k, input_precision="ieee") * scaling, float("-inf"))
        higher = tl.maximum(maximum, tl.max(logits, 1))
        weights = tl.exp(logits - higher[:, None])
        shrink = tl.exp(maximum - higher)
        v = tl.load(values + at[:, None] * VALUE_DIM + value_dim, mask=is_entry[:, None] & is_value_dim, other=0.0)
        output = output * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        maximum = higher

    place = row * splits + split
    tl.store(partial + place[:, None] * VALUE_DIM + value_dim, output, mask=is_group[:, None] & is_value_dim)
    tl.store(maxima + place, maximum, mask=is_group)
    tl.store(sums + place, total, mask=is_group)


@triton.jit
def _combine(
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
