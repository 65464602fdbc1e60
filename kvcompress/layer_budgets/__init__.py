"""Rules that share out a model's budget over its layers. A file holds one rule and its variants; each adds a
`layer_budget=`."""

import importlib
import pkgutil

from .base import LayerBudget, layer_budget, list_layer_budgets, register_layer_budget

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["LayerBudget", "layer_budget", "list_layer_budgets", "register_layer_budget"]
