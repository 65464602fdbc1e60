"""KV-cache compression for vision-language models in transformers."""

from .cache.cache import CompressedCache
from .calibration.collect import calibrate
from .clusters import KVCluster, make_cluster
from .errors import KVCompressError
from .hooks.session import Session, attach, compress
from .hooks.shared_prompt import SharedPrompt
from .inflight import Answer, Request
from .methods import MethodInfo, list_methods, register_method
from .scoring.budget import Budget
from .scoring.layer_view import Kept, LayerView
from .tokens import TokenMethod

Prompt = LayerView  # its name up to version 0.1

__all__ = [
    "Answer",
    "Budget",
    "CompressedCache",
    "KVCluster",
    "KVCompressError",
    "Kept",
    "LayerView",
    "MethodInfo",
    "Prompt",
    "Request",
    "Session",
    "SharedPrompt",
    "TokenMethod",
    "attach",
    "calibrate",
    "compress",
    "list_methods",
    "make_cluster",
    "register_method",
]
