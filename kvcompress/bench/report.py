"""What the turns amount to: shares, ratios and fractions, as rows, a table and a plot."""

import statistics
from pathlib import Path
from typing import Any

from .timing import cell, short, summary, table

BASELINE, PEER = "full", "transformers DynamicCache"
HEADER = [
    "prompt", "batch", "way", "prompt pass ms", "prompt x dynamic", "scoring %", "ms per token", "of the limit",
    "decode x dynamic", "decode x kvpress", "answer s", "KV MB", "peak MB", "largest batch",
]  # fmt: skip


def scoring_share(prompt_ms: list[float], scoring_ms: list[float]) -> dict[str, Any]:
    """Scoring, choosing and storing over all else of the prompt pass, turn by turn, summed up."""
    return summary([scoring / (all_ms - scoring) for all_ms, scoring in zip(prompt_ms, scoring_ms, strict=True)])


def speedup(ours_ms: list[float], theirs_ms: list[float]) -> dict[str, Any]:
    """How many times as fast ours is, turn by turn, summed up."""
    return summary([theirs / ours for ours, theirs in zip(ours_ms, theirs_ms, strict=True)])


def bandwidth_fraction(weight_bytes: int, kv_bytes: int, bytes_per_s: float, ms_per_token: float) -> float:
    """The time that reading weights and KV cache once takes at the copy bandwidth, over the time of a step; 1 is the
    limit."""
    return (weight_bytes + kv_bytes) / bytes_per_s / (ms_per_token / 1e3)


def rows_within(limit_bytes: int, weight_bytes: int, kv_bytes: int, batch: int) -> int:
    """The largest batch whose weights and KV caches fit into a limit, where `batch` rows have `kv_bytes`."""
    return max(0, (limit_bytes - weight_bytes) * batch // kv_bytes)


def rows_of(content: dict[str, Any], memory_limit: int | None = None) -> list[dict[str, Any]]:
    """One row per cell and way, see docs/bench.md; what does not apply is None."""
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
            peaks = [turn["peak_bytes"] for turn in taken["turns"] if turn["peak_bytes"] is not None]
            is_ours = not name.startswith(("transformers ", "kvpress "))
            dynamic = times.get(PEER) if is_ours else None
            kvpress = times.get(f"kvpress {name}")
            row |= {
                "prompt_ms": summary(prompt),
                "decode_ms": summary(step),
                "answer_ms": summary(whole),
                "scoring_share": None,
                "bandwidth_fraction": bandwidth_fraction(
                    content["weight_bytes_read"], kv_bytes, measured["copy_bytes_per_s"], statistics.median(step)
                ),
                "prompt_speedup_dynamic": dynamic and speedup(prompt, dynamic[0]),
                "speedup_dynamic": dynamic and speedup(step, dynamic[1]),
                "speedup_kvpress": kvpress and speedup(step, kvpress[1]),
                "kv_bytes": kv_bytes,
                "peak_bytes": max(peaks, default=None),
                "largest_batch": largest.get((measured["length"], name)),
            }
            scoring = [turn["scoring_ms"] for turn in taken["turns"]]
            if None not in scoring:
                row["scoring_share"] = scoring_share(prompt, scoring)
            elif is_ours and BASELINE in times:  # a second pass is all that goes beyond the full cache's
                beyond = [mine - full for mine, full in zip(prompt, times[BASELINE][0], strict=True)]
                row["scoring_share"] = scoring_share(prompt, beyond)
            if memory_limit is not None:
                row["largest_batch"] = rows_within(memory_limit, content["weight_bytes"], kv_bytes, row["batch"])
            rows.append(row)
    return rows


def _times(turns: list[dict[str, Any]]) -> tuple[list[float], list[float], list[float]]:
    """Per turn, in milliseconds: the prompt pass, the mean decode step, the whole answer."""
    prompt = [turn["prompt_ms"] for turn in turns]
    step = [statistics.fmean(turn["step_ms"]) for turn in turns]
    return prompt, step, [turn["prompt_ms"] + sum(turn["step_ms"]) for turn in turns]


def cells_of(row: dict[str, Any], spread: bool = True) -> list[str]:
    """A row as the strings of `HEADER`; with or without quartiles."""
    place = [str(row["length"]), str(row["batch"]), row["way"]]
    if "error" in row:
        return [*place, row["error"], *[""] * (len(HEADER) - 4)]

    def median(name: str, text: str, scale: float = 1) -> str:
        return "" if row[name] is None else format(scale * row[name]["median"], text)

    def spread_out(name: str, scale: float = 1) -> str:
        if row[name] is None or not spread:
            return "" if row[name] is None else short(scale * row[name]["median"])
        return cell({key: scale * value for key, value in row[name].items()})

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
    """`HEADER` and the cells, without the columns in which nothing stands."""
    used = [place for place in range(len(HEADER)) if any(row[place] for row in cells)]
    return [HEADER[place] for place in used], [[row[place] for place in used] for row in cells]


def markdown(content: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The table, with what one needs to know to read it and to make it again."""
    settings, bandwidths = content["settings"], [cell["copy_bytes_per_s"] for cell in content["cells"]]
    gains = [row["speedup_kvpress"]["median"] for row in rows if row.get("speedup_kvpress")]
    lines = [
        f"# {settings['model']}, {settings['dtype']}",
        f"`{content['command']}`",
        f"Median (quartiles) of {settings['repeats']} turns, {settings['clock']} clock, "
        f"{settings['steps']} decode steps each. {content['largest_batch_note']} docs/bench.md explains the columns.",
        f"A step reads {content['weight_bytes_read'] / 1e6:.4g} MB of weights; memory was copied at "
        f"{min(bandwidths) / 1e9:.3g} to {max(bandwidths) / 1e9:.3g} GB/s.",
        table(*columns([cells_of(row) for row in rows])).rstrip(),
    ]
    if gains:
        lines.append(f"Decoding against kvpress, geometric mean: {statistics.geometric_mean(gains):.2f}x.")
    lines.append("Made on " + ", ".join(f"{name} {value}" for name, value in content["environment"].items()) + ".")
    return "\n\n".join(lines) + "\n"


def plot(content: dict[str, Any], rows: list[dict[str, Any]], file: Path) -> None:
    """Prompt pass and decode step over prompt length, one column of axes per batch, one line per way. Needs
    matplotlib."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if "error" not in row]
    batches = sorted({row["batch"] for row in rows})
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure = Figure(figsize=(2.5 + 4 * len(batches), 7), layout="constrained")
    axes = figure.subplots(2, len(batches), squeeze=False, sharex=True)
    for column, batch in enumerate(batches):
        for across, number, what in zip(
            axes[:, column], ("prompt_ms", "decode_ms"), ("prompt pass", "token"), strict=True
        ):
            for place, way in enumerate(ways):
                line = [row for row in rows if (row["batch"], row["way"]) == (batch, way)]
                medians = [row[number]["median"] for row in line]
                spread = [[abs(row[number][q] - row[number]["median"]) for row in line] for q in ("q1", "q3")]
                style = "--" if way.startswith(("transformers ", "kvpress ")) else "-"
                across.errorbar(
                    [row["length"] for row in line], medians, spread, label=way, marker="o", ms=4, ls=style,
                    color=f"C{place % 10}",
                )  # fmt: skip
            across.set(ylabel=f"ms per {what}", title=f"batch {batch}", ylim=(0, None))
            across.set_xscale("log", base=2)
        axes[1, column].set_xlabel("prompt tokens")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(f"{content['settings']['model']}, {content['settings']['dtype']}")
    figure.savefig(file, dpi=120)
