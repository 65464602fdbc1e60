"""One file per method; importing this package registers them all."""

from .base import (
    Kept,
    KVCluster,
    MethodInfo,
    Prompt,
    list_methods,
    make_cluster,
    method_info,
    method_name,
    register_method,
)
from .full import FullKVCluster
from .knorm import KnormKVCluster
from .random import RandomKVCluster
from .snapkv import SnapKVCluster
from .streamingllm import StreamingLLMKVCluster

__all__ = [
    "FullKVCluster",
    "KVCluster",
    "Kept",
    "KnormKVCluster",
    "MethodInfo",
    "Prompt",
    "RandomKVCluster",
    "SnapKVCluster",
    "StreamingLLMKVCluster",
    "list_methods",
    "make_cluster",
    "method_info",
    "method_name",
    "register_method",
]
