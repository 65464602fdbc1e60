"""Answers that are too short to show compression: by default the first token of an answer comes from the prefill, which
attends over the whole prompt, so only the tokens behind it can see what was dropped."""

from typing import Any

import pandas as pd

from ..cells.results import exact

MOST_TOKENS = 2  # of an answer that is one token and the end of the text
EXPLANATION = (
    "With first_token=full the first token is computed on the whole cache, so such answers cannot see compression; "
    "with first_token=compressed they do."
)


def too_short(cell: dict[str, Any]) -> bool:
    """Whether a cell (its results.json) compresses, and half of its answers or more cannot show it."""
    protocol, efficiency = cell["protocol"], cell["efficiency"]
    options = protocol.get("options", {})

    def median(quantity: str) -> float:
        return efficiency.get(quantity, {}).get("median", float("inf"))

    if median("tokens_out") > MOST_TOKENS or protocol.get("first_token") != "full":
        return False
    # These drop vision tokens before the first token of the answer is computed.
    is_token_method = protocol.get("scope") is None and protocol.get("ratio_of") == "vision"
    # The last chunk of a prompt, which the first token comes from, attends over what is kept of the others.
    in_chunks = (options.get("prefill_chunk") or float("inf")) < median("tokens_in")
    compresses = efficiency["realised_ratio"]["mean"] < 1 or options.get("cache_implementation") == "quantized"
    return compresses and not is_token_method and not in_chunks


def warning(frame: pd.DataFrame) -> str:
    """One line for the cells of one task whose answers are too short; empty where there are none.

    Args:
        frame: rows of `table.cell_row`.
    """
    short = frame[frame["too_short"]]
    if short.empty:
        return ""
    others = frame[~frame["too_short"] & (frame["realised"].astype(float) < 1)]
    sizes: dict[str, list[str]] = {}
    for row in short.itertuples():
        size = exact(row.ratio) if pd.notna(row.ratio) else f"budget {row.budget:.0f}"
        sizes.setdefault(row.series, []).append(size)
    cells = ", ".join(f"{series} ({', '.join(own)})" for series, own in sizes.items())
    of = f" of {cells}" if len(others) else ""
    tokens = "1 token" if short["tokens_out"].max() <= 1 else f"at most {MOST_TOKENS} tokens"
    return f"{short['task'].iloc[0]}: the median answer{of} has {tokens}. {EXPLANATION}"
