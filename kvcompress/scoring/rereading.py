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
    block: int | None = None,
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
        block: queries at a time; None: as many as suit the device.

    Returns:
        (batch, kv_heads, sinks + chunk).
    """
    batch, kv_heads, fed, _ = fed_keys.shape
    groups, width = queries.shape[1] // kv_heads, keys.shape[2] + fed
    is_cpu = queries.device.type == "cpu"
    rows, most = (1, 1 << 18) if is_cpu else (batch, 1 << 26)  # logits at a time; a CPU keeps them in its cache
    block = block or max(16, most // (rows * queries.shape[1] * width))
    best = torch.full((batch, kv_heads, groups, keys.shape[2]), -torch.inf, dtype=torch.float32, device=keys.device)
    for first in range(0, batch, rows):
        own = slice(first, first + rows)
        columns, fed_columns = keys[own].float().mT, fed_keys[own].float().mT
        for start in range(0, fed, block):
            stop = min(start + block, fed)
            asking = queries[own, :, start:stop].float().unflatten(1, (kv_heads, groups)).flatten(2, 3) * scaling
            to_keys = (asking @ columns).masked_fill_(missing[own, None, None], -torch.inf)
            to_fed = (asking @ fed_columns[..., :stop]).masked_fill_(fed_pads[own, None, None, :stop], -torch.inf)
            to_fed = to_fed.unflatten(2, (groups, -1))  # (rows, kv_heads, groups, block, fed so far)
            future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=keys.device).triu(1)
            to_fed[..., start:].masked_fill_(future, -torch.inf)
            total = torch.logaddexp(to_keys.logsumexp(-1).unflatten(2, (groups, -1)), to_fed.logsumexp(-1))
            total = total.masked_fill(fed_pads[own, None, None, start:stop], torch.inf)  # pads ask nothing
            weights = to_keys.unflatten(2, (groups, -1)).sub_(total[..., None])
            best[own] = torch.maximum(best[own], weights.amax(3))
    best = best.exp()
    return best.amax(2) if group_votes == "max" else best.mean(2)
