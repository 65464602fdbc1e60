"""One file per method. Every file in this folder is imported, so a new file is a new method."""

import importlib
import pkgutil

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

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "KVCluster",
    "Kept",
    "MethodInfo",
    "Prompt",
    "list_methods",
    "make_cluster",
    "method_info",
    "method_name",
    "register_method",
]
