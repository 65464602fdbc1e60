"""Omni models that speak, with any KV cache, and a benchmark of how soon they do.

`answering` loads the parts of a model and answers aloud, `overlapped` starts the talker while the thinker writes, and
`streaming` makes sound window by window while the talker speaks. These three are imported when one of the names below
is used.

`kvcompress speech` is the benchmark: `command` is its command line, `run` the cold starts and warm rounds, `prompts`
holds the prompts, `kinds` names caches and parts, `strategies` creates the caches, and `report` the table.
"""

from importlib import import_module
from typing import Any

_LATER = {
    **dict.fromkeys(("Answer", "SAMPLING_RATE", "answer", "load", "weight_bytes"), "answering"),
    "PARTS": "kinds",
    "generate_overlapped": "overlapped",
    **dict.fromkeys(("Window", "stream"), "streaming"),
}
__all__ = sorted(_LATER)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
