"""Decide which rows may share a table: those of one task, asked and answered under the same protocol."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from kvcompress.policy.options import Engine

from ..cells.results import exact

DEFAULTS = {field.name: field.default for field in fields(Engine)}
# The engine's options that belong to the protocol, whatever the method. Those in ALWAYS_SAID are always listed, the
# others if they differ from their default.
FOR_ALL = ("first_token", "prefill_chunk", "cache_implementation")  # these apply to the full cache too
FOR_COMPRESSED = (
    "scope",
    "ratio_of",
    "context_tokens",
    "protect",
    "protect_text",
    "fair",
    "positions",
    "decode_budget",
    "decode_ratio",
)
QUANTIZED = {  # backend -> its options
    "quanto": ("kv_backend", "kv_bits", "kv_group_size", "kv_residual"),
    "hqq": ("kv_backend", "kv_bits", "kv_group_size", "kv_residual"),
    "turboquant": ("kv_backend", "kv_bits"),
    "fp8": ("kv_backend", "kv_bits"),
}
THINK = ("key_channels", "key_recent")
ALWAYS_SAID = ("first_token", "scope", "ratio_of")
OPTIONS = {*FOR_ALL, *FOR_COMPRESSED, *QUANTIZED["quanto"], *THINK}
# Settings that identify the model or the machine, or that the number of questions already shows.
NO_PROTOCOL = ("revision", "trust_remote_code", "device", "device_map", "tp_plan", "look_ahead", "limit")
LONG_TEXT = 512  # text tokens of a prompt, without images and videos
LONG_ANSWER = 20  # tokens


def protocol_of(cell: dict[str, Any]) -> dict[str, str]:
    """Return name -> value of everything besides method and ratio that determines a cell's numbers. The full cache has
    no `scope`, `ratio_of` and so on: see `holds_full`."""
    protocol, options = cell["protocol"], cell["protocol"].get("options", {})
    # A method that drops tokens before they are cached has no scope: it sees the whole prompt.
    given = {name: options.get(name, default) for name, default in DEFAULTS.items()}
    names = [*FOR_ALL, *(FOR_COMPRESSED if protocol["method"] != "full" else ())]
    if given["cache_implementation"] == "quantized":
        names += QUANTIZED[given["kv_backend"]]
    elif given["cache_implementation"] == "think":
        names += THINK
    said = [*ALWAYS_SAID, *QUANTIZED["quanto"], *THINK]
    facts = {name: given[name] for name in names if name in said or given[name] != DEFAULTS[name]}
    settings = protocol["settings"]
    facts |= {"slots": settings["slots"]} if "slots" in settings else {"batch_size": settings.get("batch_size", 1)}
    facts |= {name: value for name, value in sorted(settings.items()) if name not in NO_PROTOCOL}
    return {name: as_text(value) for name, value in facts.items()}


def holds_full(protocol: Mapping[str, str], full: Mapping[str, str]) -> bool:
    """Return whether cells of `protocol` are to be compared with a full cache of the protocol `full`."""
    return {name: value for name, value in protocol.items() if name not in FOR_COMPRESSED} == dict(full)


def variant(cell: dict[str, Any]) -> str:
    """Return the method with the changed options that are not part of the protocol."""
    changed = cell["protocol"]["changed_options"]
    own = "".join(f" {name}={as_text(value)}" for name, value in sorted(changed.items()) if name not in OPTIONS)
    return cell["protocol"]["method"] + own


def regime(cells: Sequence[dict[str, Any]]) -> str:
    """Describe the questions of one task: `an image`, `several images, long text`, `video, long answers`.

    Long text has at least 512 tokens besides images and videos, long answers at least 20, in the median over the cells'
    medians.
    """
    seen = {name: _median(cells, name, "p90") for name in ("images", "videos", "vision_tokens")}
    if seen["videos"]:
        kinds = ["video"]
    elif seen["images"]:
        kinds = ["several images" if seen["images"] > 1 else "an image"]
    else:  # cells of older versions do not count images and videos
        kinds = ["images or video" if seen["vision_tokens"] else "text"]
    tokens_in, vision, tokens_out = (
        _median(cells, name, "median") for name in ("tokens_in", "vision_tokens", "tokens_out")
    )
    kinds += ["long text"] * (tokens_in - vision >= LONG_TEXT) + ["long answers"] * (tokens_out >= LONG_ANSWER)
    return ", ".join(kinds)


def _median(cells: Sequence[dict[str, Any]], quantity: str, of: str) -> float:
    return float(np.median([cell["efficiency"].get(quantity, {}).get(of, 0) for cell in cells]))


def as_text(value: Any) -> str:
    """Format a value as on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return exact(value)
    if isinstance(value, dict):
        return ",".join(f"{name}={as_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return str(value)
