"""The table of results."""

from statistics import median
from typing import Any

from ..bench.results import page
from ..bench.timing import cell, short, summary, table
from .kinds import STRATEGIES

# Label -> field of a row.
COLUMNS = {
    "first text s": "first_text_s",
    "text s": "text_s",
    "first codec token s": "first_code_s",
    "first byte s": "first_audio_s",
    "whole waveform s": "waveform_s",
    "real-time factor": "real_time_factor",
}
COUNTS = {  # and its divisor
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


def by_start(content: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of cold starts and of warm rounds."""
    return {
        "cold": [{"strategy": taken["strategy"], **taken["answer"]} for taken in content["cold"]],
        "warm": [row for taken in content["warm"] for row in taken["answers"]],
    }


def rows_of(content: dict[str, Any]) -> list[list[str]]:
    """Return one row per start and strategy, with times as median (quartiles) and the rest as medians."""
    rows = []
    for start, answers in by_start(content).items():
        for strategy in content["settings"]["strategies"]:
            mine = [row for row in answers if row["strategy"] == strategy]
            if not mine:
                continue
            good = [row for row in mine if "error" not in row]
            label = content["settings"]["labels"][strategy] + ("" if len(good) == len(mine) else " (out of memory)")
            times = [cell(summary(found)) if (found := numbers(good, name)) else "" for name in COLUMNS.values()]
            counts = [short(median(found)) if (found := numbers(good, *name)) else "" for name in COUNTS.values()]
            rows.append([start, label, str(len(good)), *times, *counts])
    return rows


def numbers(rows: list[dict[str, Any]], field: str, unit: float = 1) -> list[float]:
    return [row[field] / unit for row in rows if row[field] is not None]
