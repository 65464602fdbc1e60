"""Prompts for kernel tests, and checks of the Triton kernels against the plain references."""

import torch

from kvcompress.kernels.column_sums import column_sums_reference
from kvcompress.kernels.likeness import mean_likeness_blocked
from kvcompress.scoring.selection import ADAPTIVE, adaptive_indices
from kvcompress.scoring.windows import pad_columns

# Of one query's attention: exact in fp32; 16 bits are those of queries and keys alone, which the reference has too.
TOLERANCE = 2e-5
# batch, kv_heads, groups, head_dim, columns, pads of each row, which queries count
SHAPES = [
    (1, 1, 1, 16, 1, None, None),
    (1, 2, 3, 33, 70, None, None),  # a head_dim that is no power of two; several blocks
    (2, 2, 1, 64, 70, [0, 69], None),  # a row of one token
    (3, 1, 2, 80, 70, [0, 65, 20], "window"),
    (2, 1, 2, 16, 70, [3, 0], "scattered"),
    (1, 1, 2, 128, 66, None, "weighted"),
    (2, 2, 1, 16, 40, [[1, 30], [0, 2]], "nobody"),  # pads of each KV head
]


def prompt_case(
    batch, kv_heads, groups, head_dim, columns, pads=None, counting=None, dtype=torch.float32, seed=0, device="cpu"
) -> tuple:
    """Return arguments of `column_sums`, with queries and keys laid out as by a model's projections; NaN at pads."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, columns, kv_heads * groups, head_dim, generator=generator).transpose(1, 2) * 2
    keys = torch.randn(batch, columns, kv_heads, head_dim, generator=generator).transpose(1, 2)
    column = torch.arange(columns)
    padding = None
    if pads is not None:
        padding = torch.tensor(pads).view(batch, -1)
        hidden = (column < padding[..., None])[..., None]
        keys = keys.masked_fill(hidden, float("nan"))
        queries = queries.masked_fill(hidden[:, :1] & hidden[:, -1:], float("nan"))
    weights = {
        None: lambda: None,
        "window": lambda: (column >= columns - 7).expand(batch, columns),
        "scattered": lambda: torch.rand(batch, columns, generator=generator) > 0.6,
        "weighted": lambda: torch.rand(batch, columns, generator=generator),
        "nobody": lambda: torch.zeros(batch, columns, dtype=torch.bool),
    }[counting]()
    queries, keys = queries.to(device, dtype), keys.to(device, dtype)
    padding, weights = (None if part is None else part.to(device) for part in (padding, weights))
    return queries, keys, head_dim**-0.5, padding, weights


def check_column_sums(dtype: torch.dtype, shapes: list[tuple], device: str) -> None:
    from kvcompress.kernels.column_sums_triton import column_sums_triton

    for shape in shapes:
        case = prompt_case(*shape, dtype=dtype, device=device)
        close = {"atol": TOLERANCE, "rtol": TOLERANCE}
        torch.testing.assert_close(column_sums_triton(*case), column_sums_reference(*case), **close)
    queries, keys, *rest = case  # states with non-contiguous channels
    case = (queries.mT.contiguous().mT, keys.mT.contiguous().mT, *rest)
    torch.testing.assert_close(column_sums_triton(*case), column_sums_reference(*case), **close)


def check_likeness(dtype: torch.dtype, shapes: list[tuple], device: str) -> None:
    """Check the mean likeness of keys of which half are like others; shapes in turn spare the first key or none."""
    from kvcompress.kernels.likeness_triton import mean_likeness_triton

    for number, shape in enumerate(shapes):
        _, keys, _, padding, _ = prompt_case(*shape, dtype=dtype, device=device)
        half = keys.shape[2] // 2
        keys[:, :, keys.shape[2] - half :] += 2 * keys[:, :, :half].nan_to_num(0.0)
        case = (keys, 0.5, padding, number % 2 == 0)
        expected = mean_likeness_blocked(keys.nan_to_num(0.0), *case[1:])
        torch.testing.assert_close(mean_likeness_triton(*case), expected, atol=TOLERANCE, rtol=TOLERANCE)
        if padding is None:
            expected = mean_likeness_blocked(keys.mT.contiguous().mT, *case[1:])
            torch.testing.assert_close(mean_likeness_triton(*case), expected, atol=TOLERANCE, rtol=TOLERANCE)


def check_adaptive(device: str) -> None:
    """Check which entries heads that share a budget keep, of scores with ties, pads and entries that must stay."""
    from kvcompress.kernels import adaptive_triton

    for kv_heads, columns, levels, safeguard, budgets in [
        (1, 1, 3, 0.2, [1, 1]),
        (3, 70, 3, 0.2, [30, 12.5]),
        (2, 40, 9, 0.0, [4, 11]),  # no room for all that must stay
        (5, 300, 1000, 0.37, [100, 299]),
        (8, 20, 50, 1.0, [7, 7]),
    ]:
        scores, pads = prompt_scores(2, kv_heads, columns, levels)
        totals = torch.tensor([round(budget * kv_heads) for budget in budgets])
        most = min(int(totals.max()), columns)
        masked = scores.masked_fill(pad_columns(pads, columns), -torch.inf).to(device)
        for head_budget in ADAPTIVE:
            expected = adaptive_indices(scores, budgets, safeguard, pads, head_budget)
            blends = head_budget == "adaptive"
            kept = adaptive_triton.adaptive_triton(masked, totals.to(device), most, safeguard, blends).cpu()
            assert torch.equal(kept[..., most - expected.shape[2] :], expected)
            assert (kept[..., : most - expected.shape[2]] == -1).all()


def prompt_scores(batch: int, kv_heads: int, columns: int, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores (batch, kv_heads, columns) in fp32, of few values, and the pads of each head, (batch, kv_heads)."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(levels, (batch, kv_heads, columns), generator=generator) / levels
    scores[..., -6:] = torch.inf
    return scores, torch.randint(max(1, columns // 2), (batch, kv_heads), generator=generator)


def kept_case(batch, kv_heads, key_dim, value_dim, columns, kept, dtype=torch.float32, seed=0, device="cpu") -> tuple:
    """Return arguments of `compact`: contiguous keys, values laid out as by a projection, some leading slots unused."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, kv_heads, columns, key_dim, generator=generator)
    values = torch.randn(batch, columns, kv_heads, value_dim, generator=generator).transpose(1, 2)
    chosen = torch.rand(batch, kv_heads, columns, generator=generator).argsort(-1)[..., :kept].sort().values
    unused = torch.randint(0, kept, (batch, kv_heads, 1), generator=generator)
    indices = chosen.masked_fill(torch.arange(kept) < unused, -1)
    return keys.to(device, dtype), values.to(device, dtype), indices.to(device)
