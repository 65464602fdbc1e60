"""What a prompt's entries receive while the model reads the prompt a second time."""

import torch


def received(
    queries: torch.Tensor,
    keys: torch.Tensor,
    fed_keys: torch.Tensor,
    pads: torch.Tensor,
    scaling: float,
    block: int = 128,
) -> torch.Tensor:
    """The most attention that each key of a chunk receives from any query that reads the chunk again, (batch, kv_heads,
    chunk): weights over the chunk's keys and, causally, over the fed tokens themselves (KVzip,
    https://arxiv.org/abs/2505.23416, section 3.2), the largest over queries and the query heads of a KV head.

    Args:
        queries: (batch, heads, fed, head_dim); the fed tokens are the chunk's, behind an instruction or not.
        keys, fed_keys: (batch, kv_heads, chunk or fed, head_dim).
        pads: bool (batch, chunk), True at the chunk's pad columns.
    """
    batch, kv_heads, fed, _ = fed_keys.shape
    chunk = keys.shape[2]
    fed_pads = torch.nn.functional.pad(pads, (fed - chunk, 0))  # the instruction has none
    all_keys = torch.cat([keys, fed_keys], dim=2).float()
    hidden = torch.cat([pads, fed_pads], dim=1)[:, None, None, None]
    best = torch.zeros(batch, kv_heads, chunk, device=keys.device)
    for start in range(0, fed, block):
        rows = slice(start, min(start + block, fed))
        grouped = queries[:, :, rows].float().unflatten(1, (kv_heads, -1))
        logits = grouped @ all_keys[:, :, None].transpose(3, 4) * scaling
        column = torch.arange(chunk + fed, device=keys.device) - chunk
        future = column > torch.arange(rows.start, rows.stop, device=keys.device)[:, None]
        weights = logits.masked_fill(hidden | future, -torch.inf).softmax(-1)[..., :chunk]
        weights = weights.nan_to_num(0.0).masked_fill(fed_pads[:, None, None, rows, None], 0.0)
        best = torch.maximum(best, weights.amax((2, 3)))
    return best
