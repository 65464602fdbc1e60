"""Temporary replacement of a model's methods."""

import functools
from collections.abc import Callable
from typing import Any

import torch

_NOTHING = object()


class Replacement:
    """Replaces a module's attribute, usually a method, until `remove` restores it."""

    def __init__(self, module: torch.nn.Module, name: str, value: Any):
        self._module, self._name = module, name
        self._before = vars(module).get(name, _NOTHING)  # accelerate, for instance, hooks in this way
        self._is_there = True
        setattr(module, name, value)

    def remove(self) -> None:
        """Restore the attribute. Calling this again does nothing."""
        if not self._is_there:
            return
        self._is_there = False
        if self._before is _NOTHING:
            delattr(self._module, self._name)
        else:
            setattr(self._module, self._name, self._before)

    def __enter__(self) -> "Replacement":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def wrapped(module: torch.nn.Module, name: str, wrapper: Callable[..., Any]) -> Replacement:
    """Replace a module's method by `wrapper(method, *args, **kwargs)`, which keeps its signature for `generate`."""
    method = getattr(module, name)
    return Replacement(module, name, functools.wraps(method)(functools.partial(wrapper, method)))
