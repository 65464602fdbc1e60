"""KV-cache compression for vision-language models in transformers."""

from .budget import Budget
from .cache import CompressedCache
from .clusters import Kept, KVCluster, MethodInfo, Prompt, list_methods, make_cluster, register_method
from .errors import KVCompressError
from .hook import Session, attach, compress
from .shared_prompt import SharedPrompt
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
    "SharedPrompt",
    "TokenMethod",
    "attach",
    "compress",
    "list_methods",
    "make_cluster",
    "register_method",
]
