"""Stand-in for the flash-attn package in plain torch, so that flash_attention_2 can be tested without a GPU.

The functions that transformers calls, with flash-attn's signatures, layout (batch, tokens, heads, head_dim) and
conventions: a causal mask is aligned to the bottom right, key heads are shared by groups of query heads, and a
query that sees no key gets zeros. Unlike flash-attn it takes any dtype. See the fixture in tests/conftest.py.
"""

import torch

__version__ = "2.8.0"

# Only paged caches use it; transformers takes None as "not supported".
flash_attn_with_kvcache = None


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """q (batch, queries, heads, head_dim), k and v (batch, keys, kv_heads, head_dim) -> as q."""
    _refuse(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    rows = [_attend(*row, softmax_scale, causal, window_size) for row in zip(q, k, v, strict=True)]
    return torch.stack(rows)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sequences laid end to end: q (all queries, heads, head_dim), k and v (all keys, kv_heads, head_dim) -> as q.

    cu_seqlens_q, cu_seqlens_k (sequences + 1): where each sequence starts and ends.
    """
    _refuse(
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs,
        block_table=block_table,
    )  # fmt: skip
    if cu_seqlens_q[-1] != len(q) or cu_seqlens_k[-1] != len(k):
        raise ValueError(f"cu_seqlens end at {cu_seqlens_q[-1]}, {cu_seqlens_k[-1]}; got {len(q)}, {len(k)} tokens")
    if max_seqlen_q < cu_seqlens_q.diff().max() or max_seqlen_k < cu_seqlens_k.diff().max():
        raise ValueError(f"max_seqlen {max_seqlen_q}, {max_seqlen_k} is below the longest sequence")
    output = torch.zeros_like(q)
    for i in range(len(cu_seqlens_q) - 1):
        queries = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1])
        keys = slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        output[queries] = _attend(q[queries], k[keys], v[keys], softmax_scale, causal, window_size)
    return output


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """One sequence: q (queries, heads, head_dim), k and v (keys, kv_heads, head_dim) -> as q."""
    queries, heads, head_dim = q.shape
    keys, kv_heads, _ = k.shape
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    # How far each key lies ahead of each query when the last key belongs to the last query.
    ahead = torch.arange(keys)[None] - (torch.arange(queries)[:, None] + keys - queries)
    before, after = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if after >= 0:
        hidden |= ahead > after
    if before >= 0:
        hidden |= -ahead > before
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * (head_dim**-0.5 if scale is None else scale)
    weights = scores.masked_fill(hidden.to(q.device), -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)


def _refuse(**options: object) -> None:
    """What the stand-in does not do must not pass unnoticed."""
    for name, value in options.items():
        if value is not None and value is not False and value != 0.0:
            raise NotImplementedError(f"the flash-attn stand-in has no {name} (got {value!r})")
