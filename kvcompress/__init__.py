"""KV-cache compression for vision-language models in transformers."""

from .budget import Budget
from .cache import CompressedCache
from .clusters import Kept, KVCluster, MethodInfo, Prompt, list_methods, make_cluster, register_method
from .errors import KVCompressError
from .hook import Session, attach, compress
from .tokens import TokenMethod

__all__ = [
    "Budget",
    "CompressedCache",
    "KVCluster",
    "KVCompressError",
    "Kept",
    "MethodInfo",
    "Prompt",
    "Session",
    "TokenMethod",
    "attach",
    "compress",
    "list_methods",
    "make_cluster",
    "register_method",
]
