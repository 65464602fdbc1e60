"""The name of the KV cache among a model's arguments and outputs: `cache` since transformers 5.24, before
`past_key_values`, which is still accepted."""

from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

NAMES = ("cache", "past_key_values")
CACHE = next(name for name in NAMES if name in BaseModelOutputWithPast.__dataclass_fields__)
# Since the same release attention modules, not attention functions, store in the pages of continuous batching.
MODULES_STORE = CACHE == "cache"


def cache_in(arguments: dict[str, Any]) -> Any:
    """Return the cache among a model's arguments, whichever name it has; None if there is none."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)
