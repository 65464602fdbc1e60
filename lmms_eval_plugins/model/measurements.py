"""Measurement rows, one per counted request: what a summary holds of them, and their file."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from lmms_eval.api.instance import Instance
from lmms_eval.models.model_utils.gen_metrics import log_metrics

from kvcompress.files import write_text

from .answering import Answers

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
    "kv_held_bytes",
    "kv_room_bytes",
    "peak_memory_bytes",
)


def row_of(request: Instance, answers: Answers, place: int) -> dict[str, Any]:
    """A request's measurements. Times and peak memory are the batch's; KV bytes are the row's share of it."""
    _, _, _, doc_id, task, split = request.args
    measured, tower, prompt, batch_size = answers.measured, answers.tower, answers.prompt, len(answers.texts)
    beams = len(measured.realised_ratios[0]) // batch_size
    return {
        "task": task,
        "doc_id": doc_id,
        "split": split,
        "batch_size": batch_size,
        "ttft_s": measured.ttft_s,
        "vision_s": tower.seconds,
        "vision_is_known": tower.is_known,
        "prompt_is_known": prompt.is_known,
        "tpot_s": measured.tpot_s,
        "tokens_in": measured.tokens_in[place],
        "tokens_out": measured.tokens_out[place],
        "vision_tokens": measured.vision_tokens[place],
        "kv_bytes_prompt": measured.kv_bytes_prompt // batch_size,
        "kv_bytes_end": measured.kv_bytes_end // batch_size,
        "kv_held_bytes": (measured.kv_bytes_prompt - measured.kv_room_bytes) // batch_size,
        "kv_room_bytes": measured.kv_room_bytes // batch_size,
        "realised_ratio": [layer[place * beams] for layer in measured.realised_ratios],
        # Where a pass is kept or was, other things lie in memory than where it just runs.
        "peak_memory_bytes": None if prompt.prompt_pass else measured.peak_memory_bytes,
        "on_oom": None,  # what was done where memory did not suffice
    }


def log_averages(rows: list[dict[str, Any]], seconds: float) -> None:
    """Hand lmms-eval the averages that it prints and writes under `throughput` (this rank's)."""
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
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
