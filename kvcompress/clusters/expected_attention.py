"""Expected attention: keys that future queries are expected to attend to. https://arxiv.org/abs/2510.00636"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from ..calibration.files import ModelIdentity, Shapes
from ..calibration.published import tensors_in
from ..device import on_device
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .calibrated import CalibratedKVCluster


@register_method("expected-attention")
@dataclass(frozen=True)
class ExpectedAttentionKVCluster(CalibratedKVCluster):
    """Keeps the entries with the highest expected attention from future queries times the value's norm.

    The defaults, 4 sinks, 512 positions and epsilon 0, are those of the authors' kvpress; its leaderboard uses epsilon
    0.01 and adaptive heads.

    Queries before their rotation are modelled as Gaussian. Their mean and covariance over the prompt, under the mean
    rotation of the next `future` text positions, give a key's expected weight in closed form. Sinks count neither as
    queries nor as keys, and stay. The statistics come from the latest chunk's queries in a chunked prefill, and from
    the last `window_size` queries while decoding. With `calibration=` they come from the calibration prompts, as in
    kvpress's `ExpectedAttentionStatsPress`.
    """

    sinks: NonNegativeInt = 4
    future: PositiveInt = 512
    covariance: bool = True
    epsilon: Annotated[float, Field(ge=0)] = 0.0
    window_size: PositiveInt = 128

    paper: ClassVar[str] = "https://arxiv.org/abs/2510.00636"
    unrotated_queries: ClassVar[bool] = True
    needs_calibration: ClassVar[bool] = False
    calibrated: ClassVar[Shapes] = {
        "mean": ("layers", "heads", "head_dim"),
        "covariance": ("layers", "heads", "head_dim", "head_dim"),
    }

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        if self.calibration is None:
            statistics = statistics_of(queries, view, self.sinks)
        else:
            statistics = (self.known(name, view, keys.device)[None] for name in self.calibrated)
        mean, covariance = rotated_ahead(*statistics, view, self.future)
        keys = keys.float()
        # (batch, kv_heads, groups, ...): the query heads of each KV head
        mean = mean.unflatten(1, (keys.shape[1], -1))
        logits = mean @ keys.mT * view.scaling
        if self.covariance:
            for group, spread in enumerate(covariance.unflatten(1, (keys.shape[1], -1)).unbind(2)):
                logits[:, :, group] += (keys @ spread * keys).sum(-1) * view.scaling**2 / 2
        sinks = (view.positions(keys) < self.sinks).expand(keys.shape[:3])  # and pads
        weights = logits.masked_fill(sinks[:, :, None], float("-inf")).softmax(-1).mean(2)
        return ((weights + self.epsilon) * values.float().norm(dim=-1)).masked_fill(sinks, float("inf"))

    def gather(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView
    ) -> dict[str, torch.Tensor]:
        counted = view.rotary.unrotated(queries)[0, :, self.sinks :].double()
        count = torch.tensor(float(counted.shape[1]))
        return {"sum": counted.sum(1), "products": counted.mT @ counted, "count": count}

    def known_from(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        count = sums["count"][:, None, None]
        mean = sums["sum"] / count.clamp(min=1)
        centred = sums["products"] - count[..., None] * mean[..., None] * mean[..., None, :]
        return {"mean": mean, "covariance": centred / (count[..., None] - 1).clamp(min=1)}

    @classmethod
    def from_published(cls, path: Path, model: ModelIdentity) -> dict[str, torch.Tensor]:
        """Read kvpress's `model.safetensors` for a model, such as alessiodevoto/exp_att_stats_..."""
        found = tensors_in(path, "query_mean", "query_cov")
        return {"mean": found["query_mean"].float(), "covariance": found["query_cov"].float()}


def future_queries(
    queries: torch.Tensor, view: LayerView, sinks: int, future: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the mean (batch, heads, head_dim) and covariance (batch, heads, head_dim, head_dim) of future queries.

    They are those of the given queries, before RoPE and without each row's first `sinks`, under the mean rotation of
    the next `future` text positions."""
    return rotated_ahead(*statistics_of(queries, view, sinks), view, future)


def statistics_of(queries: torch.Tensor, view: LayerView, sinks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the statistics of `future_queries` before rotation."""
    count = queries.shape[2]
    tokens = on_device(view.tokens, queries.device)[:, None]
    position = torch.arange(count, device=queries.device) + tokens - count  # among the row's tokens
    counted = (position >= sinks)[:, None, :, None] & ~queries[..., :1].isnan()
    number = counted.sum(2, keepdim=True).clamp(min=1)
    queries = queries.float().masked_fill(~counted, 0.0)
    mean = queries.sum(2, keepdim=True) / number
    centred = (queries - mean).masked_fill(~counted, 0.0)
    return mean[:, :, 0], centred.mT @ centred / number


def rotated_ahead(
    mean: torch.Tensor, covariance: torch.Tensor, view: LayerView, future: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the mean and covariance of queries by the mean rotation of the next `future` text positions.

    Shapes are as in `future_queries`; statistics with a batch of one apply to every row."""
    padding = None if view.is_decoding else view.padding
    rotation = view.rotary.mean_rotation(future, mean.shape[-1], padding)[:, None]
    return (mean[:, :, None] @ rotation.mT)[:, :, 0], rotation @ covariance @ rotation.mT
