"""CAKE: layers with spread and changing attention keep more. https://arxiv.org/abs/2503.12491"""

import math

import torch

from ..errors import KVCompressError, shown
from ..scoring.layer_view import LayerView
from .base import LayerBudget, register_layer_budget

WINDOW = 32  # observing queries, for a method without a window of its own


@register_layer_budget("cake")
class CAKELayerBudget(LayerBudget):
    """Shares in proportion to entropy^(1/tau1) * variance^(1/tau2) of the window's attention (CAKE, section 4).

    The variance is taken over the window's queries; `tau1` and `tau2` are the method's, otherwise 1 (layer
    preferences). Every layer also keeps the window itself. What exceeds the prompt in one layer goes to the others in
    equal parts."""

    def measure(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        window = min(observers(view), keys.shape[2])
        weights = view.window_attention(queries, keys, window)[..., :-window]
        entropy = -(weights * (weights + 1e-10).log()).sum((1, 2, 3, 4))
        if not weights.shape[-1]:
            return torch.zeros_like(entropy)
        variance = weights.var(3).sum((1, 2, 3))
        tau1, tau2 = (getattr(view.settings.cluster, name, 1.0) for name in ("tau1", "tau2"))
        return entropy.clamp(min=0) ** (1 / tau1) * variance ** (1 / tau2)

    def of_row(self, measured: torch.Tensor, budget: int, length: int, view: LayerView) -> list[int]:
        window = min(observers(view), budget)
        # A layer whose states are not finite has no weight.
        weights = [0.0 if math.isnan(weight) else weight for weight in measured.tolist()]
        if not all(map(math.isfinite, weights)):
            raise KVCompressError(
                f"layer_budget='cake': the layers' weights are {shown(weights)}, which fp32 cannot hold: give a larger "
                "tau1= or tau2="
            )
        shares = shared_out(weights, (budget - window) * view.num_layers, most=length - window)
        return [window + share for share in shares]


def observers(view: LayerView) -> int:
    """Return the number of queries in the window: `WINDOW` if the method has less than two, which give no variance."""
    return view.settings.query_window if view.settings.query_window > 1 else WINDOW


def shared_out(weights: list[float], total: int, most: int) -> list[int]:
    """Return integers in proportion to the weights, each at most `most`, that sum to `total`.

    As in `adjust_budgets` of CAKE's code (cake/utils.py), shares are rounded down. First the excess of full layers,
    then the remainder from rounding is spread evenly over the layers with room; earlier ones get the odd entries. (In
    CAKE's code a layer that fills up this way loses its excess; here the excess is spread again.)"""
    whole = sum(weights)
    parts = [int(weight / whole * total) if whole else 0 for weight in weights]
    excess = sum(max(part - most, 0) for part in parts)
    parts = [min(part, most) for part in _spread([min(part, most) for part in parts], excess, most)]
    while (missing := total - sum(parts)) > 0:
        parts = [min(part, most) for part in _spread(parts, missing, most)]
    return parts


def _spread(parts: list[int], more: int, most: int) -> list[int]:
    room = [layer for layer, part in enumerate(parts) if part < most]
    for place, layer in enumerate(room):
        parts[layer] += more // len(room) + (place < more % len(room))
    return parts
