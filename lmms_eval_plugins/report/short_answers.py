"""Warn of answers too short to show compression: by default an answer's first token comes from the prefill, which
attends to the whole prompt, so only later tokens are affected by eviction."""

from typing import Any

import pandas as pd

MOST_TOKENS = 2  # one token and the end of the text
EXPLANATION = (
    "With first_token=full the first token is computed on the whole cache, so such answers cannot show compression; "
    "with first_token=compressed they do."
)


def too_short(cell: dict[str, Any]) -> bool:
    """Return whether a cell (its results.json) compresses but at least half of its answers cannot show it."""
    protocol, efficiency = cell["protocol"], cell["efficiency"]
    options = protocol.get("options", {})

    def median(quantity: str) -> float:
        return efficiency.get(quantity, {}).get("median", float("inf"))

    if median("tokens_out") > MOST_TOKENS or protocol.get("first_token") != "full":
        return False
    # These have fewer vision tokens before the first token of the answer is computed.
    is_token_method = protocol.get("scope") is None and protocol.get("ratio_of") == "vision"
    # The last chunk of a prompt, which gives the first token, attends to the entries kept from earlier chunks.
    in_chunks = (options.get("prefill_chunk") or float("inf")) < median("tokens_in")
    is_packed = options.get("cache_implementation") in ("quantized", "think")
    kept = efficiency.get("realised_ratio", {"mean": protocol.get("ratio") or 0})["mean"]  # a server's is not measured
    compresses = is_packed or kept < 1
    return compresses and not is_token_method and not in_chunks


def warning(frame: pd.DataFrame) -> str:
    """Return a warning line for the cells of one task whose answers are too short; empty if there are none.

    Args:
        frame: rows of `table.cell_row`.
    """
    short = frame[frame["too_short"]]
    if short.empty:
        return ""
    others = frame[~frame["too_short"] & (frame["realised"].astype(float) < 1)]
    sizes: dict[str, list[str]] = {}
    for row in short.itertuples():
        sizes.setdefault(row.series, []).append(row.asked)
    cells = ", ".join(f"{series} ({', '.join(own)})" for series, own in sizes.items())
    of = f" of {cells}" if len(others) else ""
    tokens = "1 token" if short["tokens_out"].max() <= 1 else f"at most {MOST_TOKENS} tokens"
    return f"{short['task'].iloc[0]}: the median answer{of} has {tokens}. {EXPLANATION}"
