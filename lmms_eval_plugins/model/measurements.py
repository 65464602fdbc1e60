"""The summary of measurement rows (`Answers.row`, one per counted request), and their file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from lmms_eval.models.model_utils.gen_metrics import log_metrics

from kvcompress.files import write_text

# The numbers in a row whose spread `summarise` reports.
QUANTITIES = (
    "waited_s",
    "ttft_s",
    "vision_s",
    "tpot_s",
    "tokens_in",
    "tokens_out",
    "vision_tokens",
    "reused_tokens",
    "images",
    "videos",
    "kv_bytes_prompt",
    "kv_bytes_end",
    "kv_held_bytes",
    "kv_room_bytes",
    "peak_memory_bytes",
)


def log_averages(rows: list[dict[str, Any]], seconds: float) -> None:
    """Hand lmms-eval this rank's averages, which it prints and writes under `throughput`."""
    if not rows:
        return
    tokens, summary = sum(row["tokens_out"] for row in rows), summarise(rows)
    means = {name: summary[name]["mean"] for name in QUANTITIES if name in summary}
    log_metrics(
        total_elapsed_time=seconds,
        total_gen_tokens=tokens,
        avg_speed=tokens / seconds,
        additional_metrics={**means, "realised_ratio": summary["realised_ratio"]["mean"]},
    )


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise measurement rows for a results file.

    For each of QUANTITIES: mean, median, p10 and p90 over the rows that have it (an answer of one token has no time
    per token, one without images no time of the vision tower), left out where none has. For the realised ratio: mean,
    least and most over rows (of each row's mean over layers), and the mean per layer. `samples` is the number of rows.
    Rows of a server have neither bytes, ratios nor seconds.
    `answers_per_s` and `tokens_per_s` (of answers) are over the seconds of answering, left out where a prefix cache
    spared some; `reused_share` is the share of all prompts' tokens that it spared. `peak_kv_bytes` is the largest.
    """
    summary: dict[str, Any] = {"samples": len(rows), **throughput(rows)}
    for name in QUANTITIES:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
            summary[name] = {"mean": float(np.mean(values)), "median": median, "p10": p10, "p90": p90}
    if rows and "realised_ratio" in rows[0]:
        if any(row.get("reused_tokens") is not None for row in rows):
            reused = sum(row.get("reused_tokens") or 0 for row in rows)
            summary["reused_share"] = reused / sum(row["tokens_in"] for row in rows)
        ratios = np.array([row["realised_ratio"] for row in rows])  # (rows, layers)
        per_row = ratios.mean(1)
        summary["realised_ratio"] = {
            "mean": float(per_row.mean()),
            "min": float(per_row.min()),
            "max": float(per_row.max()),
            "per_layer": ratios.mean(0).tolist(),
        }
    return summary


def throughput(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Answers and tokens per second of all processes together, where no prefill was spared, and the most KV bytes that
    one of them held; empty for no rows, and for those of a server."""
    if not rows or "share_s" not in rows[0]:
        return {}
    peak = {"peak_kv_bytes": max(row["peak_kv_bytes"] for row in rows)}
    if any(row.get("reused_tokens") for row in rows):
        return peak
    of_ranks: dict[int, float] = {}
    for row in rows:
        of_ranks[row["rank"]] = of_ranks.get(row["rank"], 0.0) + row["share_s"]
    seconds = max(of_ranks.values())
    return {
        "answers_per_s": len(rows) / seconds,
        "tokens_per_s": sum(row["tokens_out"] for row in rows) / seconds,
        **peak,
    }


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Write rows as JSON lines, atomically: a reader never sees half a file."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
