"""Scores of a prompt's entries from a second pass of the model over the prompt."""

import torch


def received(
    queries: torch.Tensor,
    keys: torch.Tensor,
    fed_keys: torch.Tensor,
    missing: torch.Tensor,
    fed_pads: torch.Tensor,
    scaling: float,
    group_votes: str = "max",
    block: int = 128,
) -> torch.Tensor:
    """Return the largest attention that each key receives from any query that reads its chunk again.

    The keys are those of the context's sinks and one chunk. Weights cover these keys and, causally, the fed tokens
    themselves; the largest over the queries counts (KVzip, https://arxiv.org/abs/2505.23416, section 3.2). Without the
    attention sinks, chunks would not be comparable (snu-mllab/KVzip, attention/score.py, `_get_score`).

    Args:
        queries: (batch, heads, fed, head_dim); the fed tokens are the chunk's, after an instruction if there is one.
        keys, fed_keys: (batch, kv_heads, sinks + chunk or fed, head_dim).
        missing: bool (batch, sinks + chunk), True where a row has no such token; these receive nothing.
        fed_pads: bool (batch, fed), the same for the fed tokens.
        group_votes: "max" or "mean" over a KV head's query heads.

    Returns:
        (batch, kv_heads, sinks + chunk).
    """
    batch, kv_heads, fed, _ = fed_keys.shape
    chunk = keys.shape[2]
    all_keys = torch.cat([keys, fed_keys], dim=2).float()
    hidden = torch.cat([missing, fed_pads], dim=1)[:, None, None, None]
    best = torch.zeros(batch, kv_heads, queries.shape[1] // kv_heads, chunk, device=keys.device)
    for start in range(0, fed, block):
        rows = slice(start, min(start + block, fed))
        grouped = queries[:, :, rows].float().unflatten(1, (kv_heads, -1))
        logits = grouped @ all_keys[:, :, None].transpose(3, 4) * scaling
        column = torch.arange(chunk + fed, device=keys.device) - chunk
        future = column > torch.arange(rows.start, rows.stop, device=keys.device)[:, None]
        weights = logits.masked_fill(hidden | future, -torch.inf).softmax(-1)[..., :chunk]
        weights = weights.nan_to_num(0.0).masked_fill(fed_pads[:, None, None, rows, None], 0.0)
        best = torch.maximum(best, weights.amax(3))
    return best.amax(2) if group_votes == "max" else best.mean(2)
