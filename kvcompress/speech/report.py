"""The table of results."""

import statistics
from typing import Any

from ..bench.results import page
from ..bench.timing import cell, short, summary, table
from .kinds import STRATEGIES

# Label -> field of a row, and its divisor.
COLUMNS = {
    "first text s": ("first_text_s", 1),
    "text s": ("text_s", 1),
    "first codec token s": ("first_code_s", 1),
    "first byte s": ("first_audio_s", 1),
    "whole waveform s": ("waveform_s", 1),
    "real-time factor": ("real_time_factor", 1),
}
COUNTS = {
    "audio s": ("audio_s", 1),
    "underruns": ("underruns", 1),
    "text tokens": ("text_tokens", 1),
    "kept": ("realised_ratio", 1),
    "KV MB": ("kv_bytes", 1e6),
    "talker KV MB": ("talker_kv_bytes", 1e6),
    "peak MB": ("peak_memory_bytes", 1e6),
}


def markdown(content: dict[str, Any]) -> str:
    settings = content["settings"]
    header, rows = ["start", "cache", "answers", *COLUMNS, *COUNTS], rows_of(content)
    used = [place for place in range(len(header)) if any(row[place] for row in rows)]
    weights = ", ".join(f"{name} {short(size / 1e6)}" for name, size in content["weight_bytes"].items() if size)
    parts = [
        "Times are medians (quartiles) over prompts and repeats, in seconds since `generate` was called. "
        f"{how_it_sounds(settings)}docs/speech.md explains the columns.",
        f"Weights in memory, MB: {weights}.",
        table([header[place] for place in used], [[row[place] for place in used] for row in rows]),
    ]
    return page(content, f"{settings['model']}, {settings['dtype']}", *parts)


def how_it_sounds(settings: dict[str, Any]) -> str:
    if "speech" in settings["without"]:
        return ""
    chunk, behind, ahead = settings["window"]
    sound = (
        "The waveform was made in one piece, so its first byte came with its last. "
        if settings["one_piece"]
        else f"Sound was streamed while the talker wrote: {chunk} blocks of codec tokens at a time, with token2wav "
        f"seeing {behind} blocks before and {ahead} after. "
    )
    if settings["talker"]:
        sound += f"If the thinker's cache is compressed, so is the talker's: {settings['talker']}. "
    overlaps = {STRATEGIES[strategy].overlaps for strategy in settings["strategies"]}
    if True not in overlaps:
        return sound + "The talker started after the last text token. "
    where = "" if overlaps == {True} else "In overlapped rows, "
    after = "" if overlaps == {True} else ", otherwise after the last"
    return f"{sound}{where}{'the' if where else 'The'} talker started with the second text token{after}. "


def rows_of(content: dict[str, Any]) -> list[list[str]]:
    """Return one row per start and strategy, with times as median (quartiles) and the rest as medians."""
    starts = {
        "cold": [{"strategy": taken["strategy"], **taken["answer"]} for taken in content["cold"]],
        "warm": [row for taken in content["warm"] for row in taken["answers"]],
    }
    rows = []
    for start, answers in starts.items():
        for strategy in content["settings"]["strategies"]:
            mine = [row for row in answers if row["strategy"] == strategy]
            if not mine:
                continue
            good = [row for row in mine if "error" not in row]
            label = content["settings"]["labels"][strategy] + ("" if len(good) == len(mine) else " (out of memory)")
            row = [start, label, str(len(good))]
            for field, unit in COLUMNS.values():
                numbers = [one[field] / unit for one in good if one[field] is not None]
                row.append(cell(summary(numbers)) if numbers else "")
            for field, unit in COUNTS.values():
                numbers = [one[field] / unit for one in good if one[field] is not None]
                row.append(short(statistics.median(numbers)) if numbers else "")
            rows.append(row)
    return rows
