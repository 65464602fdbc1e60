"""MixKV: important keys, and diverse ones in heads whose keys are all similar. https://arxiv.org/abs/2510.20707"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from ..calibration.files import ModelIdentity, Shapes
from ..calibration.published import means_by_head
from ..device import on_device
from ..errors import KVCompressError
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.windows import pad_columns
from .calibrated import CalibratedKVCluster
from .snapkv import WindowKVCluster


@register_method("mixkv")
@dataclass(frozen=True)
class MixKVCluster(WindowKVCluster, CalibratedKVCluster):
    """Mixes importance and diversity by how redundant a head is (over SnapKV, with a window of 32).

    Importance is SnapKV's score plus the value's norm; diversity is a key's dissimilarity to the mean key. Both are
    scaled to the range of SnapKV's scores over the tokens before the window, which stays. The weight of diversity is
    the mean cosine between two keys of the head. The mean key and this weight are taken over all keys, as in the
    authors' code (mixkv_utils.py, SnapKVCluster.calcul_similarity_score); with `variant="paper"` over the keys before
    the window.

    The weights are computed from the prompt. With `calibration=` they are means over the calibration prompts, as in the
    code's scripts, which read them from a file.
    """

    variant: Literal["code", "paper"] = "code"

    paper: ClassVar[str] = "https://arxiv.org/abs/2510.20707"
    needs_calibration: ClassVar[bool] = False
    averages_window: ClassVar[bool] = True  # the mean key and the redundancy include the window
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"paper": {"averages_window": False}}
    calibrated: ClassVar[Shapes] = {"weights": ("layers", "kv_heads")}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        attention = super().score(queries, keys, values, view)
        mixed = attention.isfinite()  # all except the window
        if view.padding is not None:
            mixed = mixed & ~pad_columns(view.padding, keys.shape[2])
        averaged = mixed
        if self.of_variant("averages_window"):
            averaged = torch.ones_like(mixed)
            if view.padding is not None:
                averaged = ~pad_columns(view.padding, keys.shape[2]).expand_as(mixed)

        def rescaled(x: torch.Tensor) -> torch.Tensor:
            """Scale to [0, 1], then to the mean of the attention."""
            x = x.masked_fill(~mixed, 0.0)
            least = x.masked_fill(~mixed, float("inf")).amin(-1, keepdim=True)
            span = x.masked_fill(~mixed, float("-inf")).amax(-1, keepdim=True) - least
            differs = span > 1e-5 * x.abs().amax(-1, keepdim=True)  # else only rounding is stretched to [0, 1]
            x = torch.where(mixed & differs, (x - least) / span, 0.0)
            return x * attention.masked_fill(~mixed, 0.0).sum(-1, keepdim=True) / x.sum(-1, keepdim=True).clamp(min=1.0)

        unit = F.normalize(keys.float(), dim=-1).masked_fill(~averaged[..., None], 0.0)
        mean, redundancy = alike(unit, averaged.sum(-1, keepdim=True).clamp(min=1))
        if self.calibration is not None:
            redundancy = self.known("weights", view, keys.device)[:, None]
        diversity = rescaled(-(unit * mean).sum(-1))
        importance = attention + rescaled(values.float().norm(dim=-1))
        return torch.where(mixed, redundancy * diversity + (1 - redundancy) * importance, attention)

    def gather(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView
    ) -> dict[str, torch.Tensor]:
        before = max(keys.shape[2] - (0 if self.of_variant("averages_window") else self.window_size), 0)
        if before < 2:
            return {"sum": keys.new_zeros(keys.shape[1]), "prompts": keys.new_zeros(1)}
        unit = F.normalize(keys[:, :, :before].float(), dim=-1)
        _, redundancy = alike(unit, on_device(before, keys.device))
        return {"sum": redundancy[0, :, 0], "prompts": keys.new_ones(1)}

    def known_from(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not sums["prompts"].any():
            raise KVCompressError("every prompt is too short to compare two keys: use longer ones")
        return {"weights": sums["sum"] / sums["prompts"]}

    @classmethod
    def from_published(cls, path: Path, model: ModelIdentity) -> dict[str, torch.Tensor]:
        """Read the authors' `qwen_kv_similarity.json`, from `visual_head/head_score/`.

        It maps "layer-head-key" to one number per sample."""
        return {"weights": means_by_head(path, model.kv_heads, model.layers, "-key").float()}


def alike(unit: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean key and the mean cosine between two keys.

    Args:
        unit: (batch, kv_heads, keys, head_dim), of norm 1 for keys that count and 0 for others.
        count: the number of keys that count, (batch, kv_heads, 1) or one number.

    Returns:
        (batch, kv_heads, 1, head_dim) and (batch, kv_heads, 1).
    """
    mean = unit.sum(2, keepdim=True) / count[..., None]
    return mean, (count * (mean * mean).sum(-1) - 1) / (count - 1).clamp(min=1)
