"""Omni models that speak, and how soon they do, with any KV cache.

`answering` loads the parts of a model and answers aloud; `overlapped`: the talker begins while the thinker writes;
`streaming`: sound by windows while the talker speaks. These three are imported when one of the names below is used.

`kvcompress speech` measures it: `command` is its command line, `run` what it does; `prompts`: what is asked; `kinds`,
`strategies`: the caches; `turns`: cold starts, then warm rounds; `report`: the table.
"""

from importlib import import_module
from typing import Any

_LATER = {
    **dict.fromkeys(
        ("Answer", "PARTS", "SAMPLING_RATE", "answer", "check_policy", "load", "weight_bytes"), "answering"
    ),
    "generate_overlapped": "overlapped",
    **dict.fromkeys(("Window", "stream"), "streaming"),
}
__all__ = sorted(_LATER)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
