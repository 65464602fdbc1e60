"""Attention of one new token over segments at fixed addresses, as a PyTorch operator, so a compiled step is one graph.

Only the device knows how many entries a segment holds. On CUDA the operator runs the Triton kernel of ragged decoding,
which splits each segment over its keys, reads only its entries, and also writes the new token's key and value."""

import torch

from .ragged_decode import decode_gathered


@torch.library.custom_op("kvcompress::static_decode", mutates_args=("keys", "values"), device_types="cpu")
def static_decode(
    query: torch.Tensor,
    new_keys: torch.Tensor | None,
    new_values: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    appended: torch.Tensor,
    longest: int,
    scaling: float,
) -> torch.Tensor:
    """Write a token after its segments and attend to them.

    Args:
        query: (batch, heads, 1, head_dim).
        new_keys, new_values: the token's states (batch, kv_heads, 1, head_dim); None if they are already written.
        keys, values: contiguous buffers (..., head_dim), whose rows are counted from the front.
        starts: LongTensor (batch, kv_heads), the first row of KV head h of batch row b.
        lengths: LongTensor (batch, kv_heads), entries of each segment without appended tokens.
        appended: LongTensor (1,), tokens appended to every segment, the new one included.
        longest: at least the length that the longest segment may have.

    Returns the output (batch, heads, 1, head_dim)."""
    keys, values = keys.flatten(0, -2), values.flatten(0, -2)
    lengths = lengths + appended
    if new_keys is not None:
        rows = (starts + lengths - 1).flatten()
        keys.index_copy_(0, rows, new_keys.reshape(-1, keys.shape[1]))
        values.index_copy_(0, rows, new_values.reshape(-1, values.shape[1]))
    return decode_gathered(query, keys, values, starts, lengths, longest, scaling)


@static_decode.register_kernel("cuda")
def _(query, new_keys, new_values, keys, values, starts, lengths, appended, longest, scaling):
    from .ragged_decode_triton import ragged_decode_triton

    keys, values = keys.flatten(0, -2), values.flatten(0, -2)
    new = None if new_keys is None else (new_keys, new_values)
    return ragged_decode_triton(query, keys, values, starts, lengths, longest, scaling, new=new, appended=appended)


@static_decode.register_fake
def _(query, new_keys, new_values, keys, values, starts, lengths, appended, longest, scaling):
    return query.new_empty(*query.shape[:3], values.shape[-1])
