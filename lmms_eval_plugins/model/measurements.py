"""Measurement rows, one per counted request: what a summary holds of them, and their file."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

# What a row holds in numbers, and `summarise` gives the spread of.
QUANTITIES = (
    "ttft_s",
    "vision_s",
    "tpot_s",
    "tokens_in",
    "tokens_out",
    "vision_tokens",
    "kv_bytes_prompt",
    "kv_bytes_end",
    "peak_memory_bytes",
)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Measurement rows -> what a results file holds of them.

    For each of QUANTITIES: mean, median, p10 and p90 over the rows that have it (an answer of one token has no time
    per token, one without images no time of the vision tower), left out where none has. For the realised ratio: mean,
    least and most over rows (of each row's mean over layers), and the mean per layer. `samples` is the number of rows.
    """
    summary: dict[str, Any] = {"samples": len(rows)}
    for name in QUANTITIES:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
            summary[name] = {"mean": float(np.mean(values)), "median": median, "p10": p10, "p90": p90}
    if rows:
        ratios = np.array([row["realised_ratio"] for row in rows])  # (rows, layers)
        per_row = ratios.mean(1)
        summary["realised_ratio"] = {
            "mean": float(per_row.mean()),
            "min": float(per_row.min()),
            "max": float(per_row.max()),
            "per_layer": ratios.mean(0).tolist(),
        }
    return summary


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Writes rows as JSON lines, the whole file at once: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    os.replace(file.name, path)
