"""The KV methods, one per file. Every file in this folder is imported, so adding a file adds a method."""

import importlib
import pkgutil

from ..methods import Method, MethodInfo, list_methods, make_method, method_info, method_name, register_method
from ..scoring.layer_view import Kept, LayerView
from .base import KVCluster, make_cluster

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "KVCluster",
    "Kept",
    "LayerView",
    "Method",
    "MethodInfo",
    "list_methods",
    "make_cluster",
    "make_method",
    "method_info",
    "method_name",
    "register_method",
]
