"""Numbers as text: one rounding for every table, and what was kept beside what was asked."""

import math
from decimal import ROUND_HALF_UP, Decimal

import pandas as pd

from ..cells.results import exact

NEAR = 0.05  # of what was asked: rounding to whole tokens stays below that in prompts of some hundred tokens


def fixed(value: float, digits: int) -> str:
    """Rounded half away from zero, as JavaScript's toFixed does, so that a table and the page of the same cells agree:
    9/16 is 56.3 % in both. (Python's own format rounds 56.25 to the even 56.2.)"""
    return f"{Decimal(float(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):f}"


def share(value: float) -> str:
    """A share of KV entries, with at least three digits behind the point and three that count: 0.201, 0.0125."""
    return fixed(value, max(3, 2 - math.floor(math.log10(value))) if value > 0 else 3)


def near(realised: float | None, asked: float | None) -> bool:
    """Whether two ratios differ by at most 5 % of the second; True where one of them is unknown."""
    return bool(pd.isna(realised) or pd.isna(asked) or abs(realised - asked) <= NEAR * asked)


def kept(realised: float | None, ratio: float | None, budget: float | None = None) -> str:
    """The realised share of the prompt's KV entries. In brackets what was asked, where that is a budget, or a ratio
    that differs by more than 5 %: `0.201`, `0.499 (0.1)`, `0.168 (budget 64)`. `-` where no share was measured."""
    asked = exact(ratio) if pd.notna(ratio) else f"budget {budget:.0f}"
    if pd.isna(realised):
        return f"- ({asked})"
    return share(realised) + ("" if pd.notna(ratio) and near(realised, ratio) else f" ({asked})")
