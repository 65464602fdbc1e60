"""Numbers as text: one rounding for every table, and what was kept beside what was asked."""

import itertools
import math
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

import pandas as pd

from ..cells.results import exact

# What rounding to whole tokens, and a token that is fed again, stay below in prompts of some hundred tokens.
NEAR, NEAR_PART = 0.01, 0.1


def fixed(value: float, digits: int) -> str:
    """Rounded half away from zero, as JavaScript's toFixed does, so that a table and the page of the same cells agree:
    9/16 is 56.3 % in both. (Python's own format rounds 56.25 to the even 56.2.)"""
    return f"{Decimal(float(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):f}"


def share(value: float) -> str:
    """A share of KV entries, with at least three digits behind the point and three that count: 0.201, 0.0125."""
    return fixed(value, max(3, 2 - math.floor(math.log10(value))) if value > 0 else 3)


def shares(per_layer: Sequence[float]) -> str:
    """What layers hold, equal neighbours together: `1.000 in layers 0 to 1, 0.165 in layer 2`. Empty where all hold the
    same. Layers count among those that are compressed."""
    texts = [fixed(value, 3) for value in per_layer]
    runs = [[place for place, _ in run] for _, run in itertools.groupby(enumerate(texts), key=lambda pair: pair[1])]
    where = [f"layers {run[0]} to {run[-1]}" if len(run) > 1 else f"layer {run[0]}" for run in runs]
    return ", ".join(f"{texts[run[0]]} in {name}" for run, name in zip(runs, where, strict=True)) if runs[1:] else ""


def near(realised: float | None, asked: float | None) -> bool:
    """Whether two ratios differ by at most 0.01 and by at most a tenth of the second; True where one is unknown."""
    return bool(pd.isna(realised) or pd.isna(asked) or abs(realised - asked) <= min(NEAR, NEAR_PART * asked))


def kept(realised: float | None, ratio: float | None, budget: float | None = None) -> str:
    """The realised share of the prompt's KV entries. In brackets what was asked, where that is a budget, or a ratio
    that is not near: `0.201`, `0.499 (0.1)`, `0.168 (budget 64)`. `-` where no share was measured."""
    asked = exact(ratio) if pd.notna(ratio) else f"budget {budget:.0f}"
    if pd.isna(realised):
        return f"- ({asked})"
    return share(realised) + ("" if pd.notna(ratio) and near(realised, ratio) else f" ({asked})")
