"""The benchmark's results: shares, ratios and fractions, as rows, a table and a plot."""

import math
import statistics
from pathlib import Path
from typing import Any

from .results import page
from .timing import cell, short, summary, table

BASELINE, PEER = "full", "transformers DynamicCache"
MARKERS = "os^D"
HEADER = [
    "prompt", "batch", "cache", "prefill ms", "prefill x dynamic", "scoring %", "ms per token", "of the limit",
    "decode x dynamic", "decode x kvpress", "answer s", "KV MB", "peak MB", "largest batch",
]  # fmt: skip


# Quantities plotted and fitted against the prompt's length: key in a row -> label.
GROWING = {
    "prompt_ms": "prefill, ms",
    "scoring_ms": "scoring, ms",
    "decode_ms": "decode step, ms",
    "kv_bytes": "KV cache, MB",
}


def ratio(numbers: list[float], others: list[float]) -> dict[str, Any]:
    """Summarise, over the turns, one number relative to another."""
    return summary([one / other for one, other in zip(numbers, others, strict=True)])


def rows_of(content: dict[str, Any], memory_limit: int | None = None) -> list[dict[str, Any]]:
    """Return one row per cell and contender, see docs/bench.md. Values that do not apply are None.

    Ratios compare turn by turn, so that other load on the machine changes little. Weights and KV caches of the largest
    batch fit into `memory_limit` bytes.
    """
    largest = {(found["length"], found["way"]): found["batch"] for found in content["largest"]}
    rows = []
    for measured in content["cells"]:
        times = {name: _times(taken["turns"]) for name, taken in measured["ways"].items() if "turns" in taken}
        for name, taken in measured["ways"].items():
            row = {"length": measured["length"], "batch": measured["batch"], "way": name}
            if "error" in taken:
                rows.append({**row, "error": taken["error"]})
                continue
            prompt, step, whole = times[name]
            kv_bytes = taken["turns"][-1]["kv_bytes"]
            reading_ms = 1e3 * (content["weight_bytes_read"] + kv_bytes) / measured["copy_bytes_per_s"]
            peaks = [turn["peak_bytes"] for turn in taken["turns"] if turn["peak_bytes"] is not None]
            is_ours = not name.startswith(("transformers ", "kvpress "))
            dynamic = times.get(PEER) if is_ours else None
            kvpress = times.get(f"kvpress {name}")
            row |= {
                "prompt_ms": summary(prompt),
                "decode_ms": summary(step),
                "answer_ms": summary(whole),
                "scoring_ms": None,
                "scoring_share": None,
                # The time to read weights and KV cache once at the copy bandwidth, relative to a step; 1 is the limit.
                "bandwidth_fraction": reading_ms / statistics.median(step),
                "prompt_speedup_dynamic": dynamic and ratio(dynamic[0], prompt),
                "speedup_dynamic": dynamic and ratio(dynamic[1], step),
                "speedup_kvpress": kvpress and ratio(kvpress[1], step),
                "kv_bytes": kv_bytes,
                "peak_bytes": max(peaks, default=None),
                "largest_batch": largest.get((measured["length"], name)),
            }
            scoring = [turn["scoring_ms"] for turn in taken["turns"]]
            if None in scoring and is_ours and BASELINE in times:  # not timed separately: the time beyond `full`'s
                scoring = [mine - full for mine, full in zip(prompt, times[BASELINE][0], strict=True)]
            if None not in scoring:
                others = [mine - part for mine, part in zip(prompt, scoring, strict=True)]
                row |= {"scoring_ms": summary(scoring), "scoring_share": ratio(scoring, others)}
            if memory_limit is not None:
                row["largest_batch"] = max(0, (memory_limit - content["weight_bytes"]) * row["batch"] // kv_bytes)
            rows.append(row)
    return rows


def _times(turns: list[dict[str, Any]]) -> tuple[list[float], list[float], list[float]]:
    """Return the milliseconds of the prefill, the mean decode step and the whole answer, for each turn."""
    prompt = [turn["prompt_ms"] for turn in turns]
    step = [statistics.fmean(turn["step_ms"]) for turn in turns]
    return prompt, step, [turn["prompt_ms"] + sum(turn["step_ms"]) for turn in turns]


def cells_of(row: dict[str, Any], spread: bool = True) -> list[str]:
    """Format a row as the columns of `HEADER`, with or without quartiles."""
    place = [str(row["length"]), str(row["batch"]), row["way"]]
    if "error" in row:
        return [*place, row["error"], *[""] * (len(HEADER) - 4)]

    def median(name: str, text: str, scale: float = 1) -> str:
        return "" if row[name] is None else format(scale * row[name]["median"], text)

    def spread_out(name: str, scale: float = 1) -> str:
        if row[name] is None:
            return ""
        taken = {key: scale * value for key, value in row[name].items()}
        return cell(taken) if spread else short(taken["median"])

    return [
        *place,
        spread_out("prompt_ms"),
        median("prompt_speedup_dynamic", ".2f"),
        spread_out("scoring_share", 100),
        spread_out("decode_ms"),
        f"{row['bandwidth_fraction']:.2f}",
        median("speedup_dynamic", ".2f"),
        median("speedup_kvpress", ".2f"),
        median("answer_ms", ".3g", 1e-3),
        f"{row['kv_bytes'] / 1e6:.4g}",
        "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
        "" if row["largest_batch"] is None else str(row["largest_batch"]),
    ]


def columns(cells: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Return `HEADER` and the cells without empty columns."""
    used = [place for place in range(len(HEADER)) if any(row[place] for row in cells)]
    return [HEADER[place] for place in used], [[row[place] for place in used] for row in cells]


def markdown(content: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the table, with what is needed to read it and to reproduce it."""
    settings, bandwidths = content["settings"], [cell["copy_bytes_per_s"] / 1e9 for cell in content["cells"]]
    compressed = [row for row in rows if row["way"] != "full"]
    gains = [row["speedup_kvpress"]["median"] for row in compressed if row.get("speedup_kvpress")]
    parts = [
        f"Median (quartiles) of {settings['repeats']} turns, {settings['clock']} clock, "
        f"{settings['steps']} decode steps each. {content['largest_batch_note']} docs/bench.md explains the columns.",
        f"A step reads {content['weight_bytes_read'] / 1e6:.4g} MB of weights"
        + (f"; memory was copied at {min(bandwidths):.3g} to {max(bandwidths):.3g} GB/s." if bandwidths else "."),
        table(*columns([cells_of(row) for row in rows])),
    ]
    if grown := growth_table(rows):
        parts += ["Growth with the prompt's length, as the exponent fitted to the medians (1: linear):", grown]
    if gains:
        parts.append(f"Decoding against kvpress, geometric mean: {statistics.geometric_mean(gains):.2f}x.")
    return page(content, f"{settings['model']}, {settings['dtype']}", *parts)


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit how each contender's costs grow with the prompt's length.

    For each batch and contender, and each name in `GROWING`, it is the least-squares slope of log cost over log length
    (1 is linear), or None if not timed. Empty if there is only one length.
    """
    found = []
    for batch, contender in dict.fromkeys((row["batch"], row["way"]) for row in rows):
        line = [row for row in rows if (row["batch"], row["way"]) == (batch, contender) and "error" not in row]
        if len({row["length"] for row in line}) < 2:
            continue
        slopes = {name: _slope([(row["length"], value(row, name)) for row in line]) for name in GROWING}
        found.append({"batch": batch, "way": contender, **slopes})
    return found


def _slope(points: list[tuple[int, float | None]]) -> float | None:
    if any(cost is None or cost <= 0 for _, cost in points):
        return None
    lengths, costs = zip(*((math.log(length), math.log(cost)) for length, cost in points), strict=True)
    return statistics.linear_regression(lengths, costs).slope


def value(row: dict[str, Any], name: str) -> float | None:
    """Return one number of a row: a median, or bytes in MB."""
    if name == "kv_bytes":
        return row[name] / 1e6
    return row[name] and row[name]["median"]


def growth_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [found["batch"], found["way"], *("" if found[name] is None else f"{found[name]:.2f}" for name in GROWING)]
        for found in growth(rows)
    ]
    return lines and table(["batch", "cache", *(label.split(",")[0] for label in GROWING.values())], lines)


def plot(content: dict[str, Any], rows: list[dict[str, Any]], file: Path) -> None:
    """Plot the quantities of `GROWING` over prompt length, with a column per batch and a line per contender.

    Both axes are logarithmic, so linear growth has the slope of the grey line, drawn where there are several lengths.
    Needs matplotlib.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if "error" not in row]
    batches = sorted({row["batch"] for row in rows})
    lengths = sorted({row["length"] for row in rows})
    contenders = list(dict.fromkeys(row["way"] for row in rows))
    figure = Figure(figsize=(3.5 + 4 * len(batches), 2.6 * len(GROWING)), layout="constrained")
    axes = figure.subplots(len(GROWING), len(batches), squeeze=False, sharex=True)
    for column, batch in enumerate(batches):
        for axis, (name, label) in zip(axes[:, column], GROWING.items(), strict=True):
            for place, contender in enumerate(contenders):
                line = [row for row in rows if (row["batch"], row["way"]) == (batch, contender)]
                line = [row for row in line if (value(row, name) or 0) > 0]  # a difference may fall below 0
                style = "--" if contender.startswith(("transformers ", "kvpress ")) else "-"
                color = f"C{place % 10}"
                own, medians = [row["length"] for row in line], [value(row, name) for row in line]
                marker = MARKERS[place // 10 % len(MARKERS)]
                axis.plot(own, medians, style, marker=marker, ms=4, label=contender, color=color)
                if name != "kv_bytes":
                    spread = [[row[name][q] for row in line] for q in ("q1", "q3")]
                    axis.fill_between(own, *spread, alpha=0.15, color=color)
            axis.set(ylabel=label, xscale="log", yscale="log")
            if lengths[1:]:
                _draw_linear(axis)
        axes[0, column].set_title(f"batch {batch}")
        axes[-1, column].set_xticks(lengths, [str(length) for length in lengths])
        axes[-1, column].minorticks_off()
        axes[-1, column].set_xlabel("prompt tokens")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    linear = "; grey: linear growth" if lengths[1:] else ""
    figure.suptitle(f"{content['settings']['model']}, {content['settings']['dtype']}\nmedians and quartiles{linear}")
    figure.savefig(file, dpi=120)


def _draw_linear(axis: Any) -> None:
    """Draw a grey line of slope 1 through the lower left corner."""
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    axis.plot([left, right], [bottom, bottom * right / left], color="0.8", lw=1, zorder=0)
    axis.set(xlim=(left, right), ylim=(bottom, top))
