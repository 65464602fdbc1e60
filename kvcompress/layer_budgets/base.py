"""`LayerBudget`, the base class of rules that share out a budget over layers, and the registry of rules."""

import math
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import ClassVar, TypeVar

import torch

from ..errors import KVCompressError, shown, unknown_name
from ..scoring.budget import allocate
from ..scoring.layer_view import LayerView


class LayerBudget:
    """Shares out the entries that all layers may keep together. The sum is exact for every row if `is_exact`.

    A rule derives from this class and defines `fixed` or, if the shares depend on the prompt, `measure`, and `weights`
    if what it measures is not yet the shares. With `measure`, every layer is measured right after its attention, and
    nothing is dropped before the last layer is done, so peak memory holds the whole prompt in all layers.
    """

    is_exact: ClassVar[bool] = True  # the layers together hold the budget that was asked for

    measures_queries: ClassVar[bool] = True  # `measure` uses queries, not only the scores

    @property
    def asks_queries(self) -> bool:
        return self.is_measured and self.measures_queries

    @property
    def measures_shares(self) -> bool:
        """Whether what is measured are the shares as they are, so that all of it must be finite."""
        own = type(self)
        return (own.weights, own.of_row) == (LayerBudget.weights, LayerBudget.of_row)

    @property
    def is_measured(self) -> bool:
        return type(self).measure is not LayerBudget.measure

    def fixed(self, budget: int, length: int, num_layers: int, window: int, beta: float) -> list[int]:
        """Return the entries of each layer, for a row of `length` tokens and a mean of `budget`.

        `window` is the method's `query_window`, `beta` the option `pyramid_beta`."""
        raise TypeError(f"{type(self).__name__} defines neither fixed nor measure")

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        """Measure one layer: (batch, ...) in fp32.

        Arguments are as in `KVCluster.score`, plus its scores (batch, kv_heads, keys)."""
        raise TypeError(f"{type(self).__name__} does not measure")

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        """Return the layers' shares of a row, in any unit.

        Takes the row's `measured` (num_layers, ...), mean budget and length."""
        return measured.tolist()

    def budgets(self, view: LayerView, measured: torch.Tensor | None = None) -> list[list[int]]:
        """Return the entries per KV head, [layer][row]. `measured` is (num_layers, batch, ...), on the CPU."""
        rows = [
            self.of_row(None if measured is None else measured[:, row], budget, length, view)
            for row, (budget, length) in enumerate(zip(view.budgets, view.lengths, strict=True))
        ]
        return [list(layer) for layer in zip(*rows, strict=True)]

    def of_row(self, measured: torch.Tensor | None, budget: int, length: int, view: LayerView) -> list[int]:
        """Return one row's entries in each layer.

        Raises KVCompressError if `fixed` returns anything but a whole number per layer, with the sum asked for, and if
        `weights` returns anything but a finite number per layer (of what is not finite, any number)."""
        if not budget:  # nothing in this row can be evicted
            return [0] * view.num_layers
        if measured is None:
            return self._fixed(budget, length, view)
        return allocate(self.checked_weights(measured, budget, length), budget * view.num_layers, most=length)

    def checked_weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        """Return `weights`, zero for those that are not finite. Raises KVCompressError if they are not a number per
        layer, each finite if all that was measured is."""
        found = self.weights(measured, budget, length)
        try:
            weights = [float(each) for each in found]
        except (TypeError, ValueError):
            weights = []
        is_finite = all(map(math.isfinite, weights)) or not bool(measured.isfinite().all())
        if len(weights) != len(measured) or not is_finite:
            raise KVCompressError(
                f"{type(self).__name__}.weights returned {shown(found)}: it must be {len(measured)} finite numbers, "
                "one per layer"
            )
        return [weight if math.isfinite(weight) else 0.0 for weight in weights]

    def _fixed(self, budget: int, length: int, view: LayerView) -> list[int]:
        layers, total = view.num_layers, budget * view.num_layers
        found = self.fixed(budget, length, layers, view.settings.query_window, view.settings.pyramid_beta)
        entries = list(found) if isinstance(found, Iterable) else []
        if (
            len(entries) != layers
            or not all(isinstance(each, Integral) and 0 <= each <= length for each in entries)
            or (self.is_exact and sum(entries) != total)
        ):
            raise KVCompressError(
                f"{type(self).__name__}.fixed returned {found}: it must be {layers} whole numbers from 0 to {length}, "
                f"the row's length, with the sum {total}"
            )
        return entries


_RULES: dict[str, LayerBudget] = {}
Rule = TypeVar("Rule", bound=type[LayerBudget])


def register_layer_budget(name: str) -> Callable[[Rule], Rule]:
    """Class decorator that registers a rule as `layer_budget=name`. The name must not be taken."""
    if not isinstance(name, str):
        raise KVCompressError('register_layer_budget takes the name of the rule: @register_layer_budget("first-half")')

    def register(cls: Rule) -> Rule:
        known = type(_RULES[name]) if name in _RULES else None
        if known and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise KVCompressError(f"layer budget {name!r} is already registered by {known.__qualname__}")
        _RULES[name] = cls()
        return cls

    return register


def list_layer_budgets() -> dict[str, LayerBudget]:
    """Return all registered rules by name."""
    return dict(sorted(_RULES.items()))


def layer_budget(name: str) -> LayerBudget:
    """Return the rule with this name. Raises KVCompressError with the valid names."""
    if name not in _RULES:
        raise unknown_name("there is no layer_budget", name, _RULES)
    return _RULES[name]
