"""Format numbers: one rounding for every table, and the share kept beside the share requested."""

import itertools
import math
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

import pandas as pd

from ..cells.results import exact

# Larger than the effect of rounding to whole tokens, or of one token fed again, in prompts of a few hundred tokens.
NEAR, NEAR_PART = 0.01, 0.1


def fixed(value: float, digits: int) -> str:
    """Round half away from zero, as JavaScript's toFixed does, so that tables and pages of the same cells agree: 9/16
    is 56.3 % in both. (Python's own format rounds 56.25 to the even 56.2.)"""
    return f"{Decimal(float(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):f}"


def text_of(value: float | None, digits: int, factor: float = 1, unit: str = "") -> str:
    """Format a number with its unit, as `fixed` rounds it; `-` if it is missing."""
    return "-" if pd.isna(value) else fixed(factor * value, digits) + unit


def share(value: float) -> str:
    """Format a share of KV entries with at least three decimals and three significant digits: 0.201, 0.0125."""
    return fixed(value, max(3, 2 - math.floor(math.log10(value))) if value > 0 else 3)


def shares(per_layer: Sequence[float]) -> str:
    """Format the shares that layers hold, grouping equal neighbours: `1.000 in layers 0 to 1, 0.165 in layer 2`. Empty
    if all hold the same. Only compressed layers are counted."""
    texts = [fixed(value, 3) for value in per_layer]
    runs = [[place for place, _ in run] for _, run in itertools.groupby(enumerate(texts), key=lambda pair: pair[1])]
    where = [f"layers {run[0]} to {run[-1]}" if len(run) > 1 else f"layer {run[0]}" for run in runs]
    return ", ".join(f"{texts[run[0]]} in {name}" for run, name in zip(runs, where, strict=True)) if runs[1:] else ""


def near(realised: float | None, asked: float | None) -> bool:
    """Return whether two ratios differ by at most 0.01 and by at most a tenth of the second; True if one is unknown."""
    return bool(pd.isna(realised) or pd.isna(asked) or abs(realised - asked) <= min(NEAR, NEAR_PART * asked))


def kept(realised: float | None, ratio: float | None, budget: float | None = None) -> str:
    """Format the realised share of the prompt's KV entries. A requested budget, or a requested ratio that is not near,
    follows in brackets: `0.201`, `0.499 (0.1)`, `0.168 (budget 64)`. `-` if no share was measured."""
    asked = exact(ratio) if pd.notna(ratio) else f"budget {budget:.0f}"
    if pd.isna(realised):
        return f"- ({asked})"
    return share(realised) + ("" if pd.notna(ratio) and near(realised, ratio) else f" ({asked})")
