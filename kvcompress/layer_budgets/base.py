"""What a rule for layer budgets is, and the registry of rules."""

from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch

from ..errors import KVCompressError, unknown_name
from ..scoring.budget import allocate
from ..scoring.layer_view import LayerView


class LayerBudget:
    """Shares out what all layers may keep together; the sum is exact for every row, but for rules that say otherwise.

    A rule that derives from this gives `fixed`, or, where the shares follow from the prompt, `measure` and `weights`.
    Then every layer is measured right after its attention and nothing is dropped before the last layer is done, so
    that the peak holds the whole prompt in all layers.
    """

    is_exact: ClassVar[bool] = True  # the layers hold together what was asked for

    measures_queries: ClassVar[bool] = True  # `measure` looks at queries, not at the scores alone

    @property
    def asks_queries(self) -> bool:
        return self.is_measured and self.measures_queries

    @property
    def is_measured(self) -> bool:
        return type(self).measure is not LayerBudget.measure

    def fixed(self, budget: int, length: int, num_layers: int, window: int, beta: float) -> list[int]:
        """Entries of each layer, for a row of `length` tokens and a mean of `budget`; `window` is what the method
        protects, `beta` the steepness that was asked for (`pyramid_beta`)."""
        raise TypeError(f"{type(self).__name__} defines neither fixed nor measure")

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        """What is to be known of one layer: (batch, ...) in fp32. Arguments as in `KVCluster.score`, and its scores
        (batch, kv_heads, keys)."""
        raise TypeError(f"{type(self).__name__} does not measure")

    def weights(self, measured: torch.Tensor, budget: int, length: int) -> list[float]:
        """The layers' shares, in any unit, from one row's `measured` (num_layers, ...), its mean budget and length."""
        return measured.tolist()

    def budgets(self, view: LayerView, measured: torch.Tensor | None = None) -> list[list[int]]:
        """Entries per KV head, [layer][row]. `measured` is (num_layers, batch, ...), on the CPU."""
        rows, asked = [], view.settings
        for row, (budget, length) in enumerate(zip(view.budgets, view.lengths, strict=True)):
            if not budget:  # nothing of this row can be evicted
                rows.append([0] * view.num_layers)
            elif measured is None:
                rows.append(self.fixed(budget, length, view.num_layers, asked.query_window, asked.pyramid_beta))
            else:
                weights = self.weights(measured[:, row], budget, length)
                rows.append(allocate(weights, budget * view.num_layers, most=length))
        return [list(layer) for layer in zip(*rows, strict=True)]


_RULES: dict[str, LayerBudget] = {}
Rule = TypeVar("Rule", bound=type[LayerBudget])


def register_layer_budget(name: str) -> Callable[[Rule], Rule]:
    """Class decorator: makes a rule usable as `layer_budget=name`. The name must be free."""

    def register(cls: Rule) -> Rule:
        known = type(_RULES[name]) if name in _RULES else None
        if known and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise KVCompressError(f"layer budget {name!r} is already registered by {known.__qualname__}")
        _RULES[name] = cls()
        return cls

    return register


def list_layer_budgets() -> dict[str, LayerBudget]:
    """All registered rules."""
    return dict(sorted(_RULES.items()))


def layer_budget(name: str) -> LayerBudget:
    """The rule of a name. Raises KVCompressError with the valid names."""
    if name not in _RULES:
        raise unknown_name("there is no layer_budget", name, _RULES)
    return _RULES[name]
