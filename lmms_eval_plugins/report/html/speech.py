"""Collect the data of a speech run's page, which plays the answers of every cache side by side."""

import base64
import statistics
import wave
from pathlib import Path
from typing import Any

import numpy as np

from kvcompress import KVCompressError
from kvcompress.errors import one_line
from kvcompress.files import parse_json
from kvcompress.speech.report import by_start, how_it_sounds, numbers
from kvcompress.speech.strategies import STRATEGIES

from ...cells.errors import leave_out

MOST_PROMPTS = 20  # a second of sound takes 64 kB of the page
BINS = 400  # per waveform, each with its lowest and highest sample
MEDIANS = (
    "first_text_s", "text_s", "first_code_s", "first_audio_s", "waveform_s", "audio_s", "real_time_factor", "underruns",
    "text_tokens", "realised_ratio", "kv_bytes", "talker_kv_bytes",
)  # fmt: skip


def speech_data(file: Path) -> dict[str, Any]:
    """Return the data of the page for a `.json` of `kvcompress speech`, with the sound from the files it names.

    Raises KVCompressError for any other file, or if no warm round is finished.
    """
    try:
        content = parse_json(file.read_bytes())
        if content["warm"]:
            return page_of(content, file.parent)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {one_line(error, 200)}"
        raise KVCompressError(f"{str(file)!r} is not the result of a speech run ({what})") from None
    raise KVCompressError(f"{str(file)!r} has no finished warm round: continue it with --resume")


def page_of(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {
        "how": how_it_sounds(content["settings"]),
        "command": content["command"],
        "made": ", ".join(f"{name} {value}" for name, value in content["environment"].items()),
        "rows": table_rows(content),
        "prompts": [of_prompt(content, place, folder) for place in range(len(content["prompts"][:MOST_PROMPTS]))],
        "all_prompts": len(content["prompts"]),
    }


def table_rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each start (warm, cold) and cache, with medians over prompts and repeats."""
    rows, answers_of = [], by_start(content)
    for start in ("warm", "cold"):
        for strategy, label in content["settings"]["labels"].items():
            mine = [row for row in answers_of[start] if row["strategy"] == strategy and "error" not in row]
            if mine:
                rows.append({"start": start, "label": label, **{name: median(mine, name) for name in MEDIANS}})
    return rows


def median(rows: list[dict[str, Any]], name: str) -> float | None:
    found = numbers(rows, name)
    return statistics.median(found) if found else None


def of_prompt(content: dict[str, Any], place: int, folder: Path) -> dict[str, Any]:
    """Return the last round's answers to one prompt, those of transformers' own caches first."""
    labels = content["settings"]["labels"]
    rows = {row["strategy"]: row for row in content["warm"][-1]["answers"] if row["prompt"] == place}
    order = sorted(rows, key=lambda strategy: (STRATEGIES[strategy].compresses, list(labels).index(strategy)))
    return {
        **content["prompts"][place],
        "answers": [
            {
                "label": labels[strategy],
                "error": rows[strategy].get("error"),
                "text": rows[strategy].get("text"),
                **{name: rows[strategy].get(name) for name in MEDIANS},
                **sound_of(rows[strategy].get("wav"), folder),
            }
            for strategy in order
        ],
    }


def sound_of(name: str | None, folder: Path) -> dict[str, Any]:
    """Return a WAV file as a data URL, and the waveform's `low` and `high`: the extreme samples of each of `BINS`
    parts, in [-1, 1]. All are None if the file is missing or damaged."""
    nothing = {"audio": None, "low": None, "high": None}
    if name is None:
        return nothing
    try:
        stored = (folder / name).read_bytes()
        with wave.open(str(folder / name)) as sound:
            samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(float) / 32767
        if not len(samples):
            raise EOFError("it has no samples")
    except (OSError, EOFError, wave.Error, ValueError) as error:
        leave_out(folder / name, str(error))
        return nothing
    parts = np.array_split(samples, min(BINS, len(samples)))
    return {
        "audio": "data:audio/wav;base64," + base64.b64encode(stored).decode(),
        "low": [round(float(part.min()), 4) for part in parts],
        "high": [round(float(part.max()), 4) for part in parts],
    }
