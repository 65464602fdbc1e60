"""Token methods: they drop vision tokens before or inside the language model. Every file here is imported."""

import importlib
import pkgutil

from .base import TokenMethod, Tokens

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["TokenMethod", "Tokens"]
