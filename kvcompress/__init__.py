"""KV-cache compression for vision-language models in transformers.

The names in `__all__` are imported on first use: importing torch and transformers takes seconds, and a misspelt command
gets its answer without them.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .errors import KVCompressError
from .methods import MethodInfo, list_methods, register_method
from .version import __version__

if TYPE_CHECKING:
    from .cache.cache import CompressedCache
    from .calibration.collect import calibrate
    from .clusters.base import KVCluster, make_cluster
    from .hooks.prefix_cache import PrefixCache
    from .hooks.session import Session, attach, compress
    from .hooks.shared_prompt import SharedPrompt
    from .inflight import Answer, Request
    from .policy.passages import token_spans
    from .scoring.budget import Budget
    from .scoring.layer_view import Kept, LayerView
    from .scoring.rows import handles_padding
    from .tokens.base import TokenMethod

    Prompt = LayerView

_LATER = {
    "Answer": "inflight",
    "Budget": "scoring.budget",
    "CompressedCache": "cache.cache",
    "KVCluster": "clusters.base",
    "Kept": "scoring.layer_view",
    "LayerView": "scoring.layer_view",
    "PrefixCache": "hooks.prefix_cache",
    "Request": "inflight",
    "Session": "hooks.session",
    "SharedPrompt": "hooks.shared_prompt",
    "TokenMethod": "tokens.base",
    "attach": "hooks.session",
    "calibrate": "calibration.collect",
    "compress": "hooks.session",
    "handles_padding": "scoring.rows",
    "make_cluster": "clusters.base",
    "token_spans": "policy.passages",
}

__all__ = [
    "Answer",
    "Budget",
    "CompressedCache",
    "KVCluster",
    "KVCompressError",
    "Kept",
    "LayerView",
    "MethodInfo",
    "PrefixCache",
    "Prompt",
    "Request",
    "Session",
    "SharedPrompt",
    "TokenMethod",
    "__version__",
    "attach",
    "calibrate",
    "compress",
    "handles_padding",
    "list_methods",
    "make_cluster",
    "register_method",
    "token_spans",
]


def __getattr__(name: str) -> Any:
    """Import a name in `_LATER`, or a module of this package (PEP 562)."""
    if name == "Prompt":  # LayerView's name up to version 0.1
        name = "LayerView"
    if name in _LATER:
        globals()[name] = value = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
