"""MixKV: important keys, and where a head's keys are all alike, different ones. https://arxiv.org/abs/2510.20707"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.windows import pad_columns
from .snapkv import WindowKVCluster


@register_method("mixkv")
@dataclass(frozen=True)
class MixKVCluster(WindowKVCluster):
    """Mixes importance and diversity by how redundant a head is (over SnapKV, with a window of 32).

    Importance is SnapKV's score plus the value's norm, diversity how little a key is like the mean key; both are
    brought to the range of SnapKV's scores, over the tokens before the window, which stays. The weight of diversity is
    the mean cosine of two keys of the head. The mean key and this weight are those of all keys, as in the authors' code
    (mixkv_utils.py, SnapKVCluster.calcul_similarity_score), with `variant="paper"` of those before the window.

    The code's scripts take the weights from a file, means over the samples of a data set; here they follow from the
    prompt, by the code's own function.
    """

    variant: Literal["code", "paper"] = "code"

    paper: ClassVar[str] = "https://arxiv.org/abs/2510.20707"

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        attention = super().score(queries, keys, values, view)
        mixed = attention.isfinite()  # all but the window
        if view.padding is not None:
            mixed = mixed & ~pad_columns(view.padding, keys.shape[2])
        averaged = mixed
        if self.variant == "code":
            averaged = torch.ones_like(mixed)
            if view.padding is not None:
                averaged = ~pad_columns(view.padding, keys.shape[2]).expand_as(mixed)

        def rescaled(x: torch.Tensor) -> torch.Tensor:
            """To [0, 1], then to the mean of the attention."""
            x = x.masked_fill(~mixed, 0.0)
            least = x.masked_fill(~mixed, float("inf")).amin(-1, keepdim=True)
            span = x.masked_fill(~mixed, float("-inf")).amax(-1, keepdim=True) - least
            differs = span > 1e-5 * x.abs().amax(-1, keepdim=True)  # else rounding alone would be spread over [0, 1]
            x = torch.where(mixed & differs, (x - least) / span, 0.0)
            return x * attention.masked_fill(~mixed, 0.0).sum(-1, keepdim=True) / x.sum(-1, keepdim=True).clamp(min=1.0)

        count = averaged.sum(-1, keepdim=True).clamp(min=1)
        unit = F.normalize(keys.float(), dim=-1).masked_fill(~averaged[..., None], 0.0)
        mean = unit.sum(2, keepdim=True) / count[..., None]
        redundancy = (count * (mean * mean).sum(-1) - 1) / (count - 1).clamp(min=1)
        diversity = rescaled(-(unit * mean).sum(-1))
        importance = attention + rescaled(values.float().norm(dim=-1))
        return torch.where(mixed, redundancy * diversity + (1 - redundancy) * importance, attention)
