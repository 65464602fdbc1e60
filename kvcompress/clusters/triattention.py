"""TriAttention: the mean query's attention to a key, over many distances. https://arxiv.org/abs/2604.04921"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt

from ..calibration.files import ModelIdentity, Shapes
from ..calibration.published import pickled_in
from ..errors import KVCompressError, shown
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .calibrated import CalibratedKVCluster


@register_method("triattention")
@dataclass(frozen=True)
class TriAttentionKVCluster(CalibratedKVCluster):
    """Keeps the keys that the mean query of a calibration attends to most from future positions (section 4).

    The score is the trigonometric series sum |E q_f| |k_f| cos(w_f distance + phi_f) over channel pairs f, with queries
    before RoPE, averaged over the distances 1, 2, 4, ... up to `farthest`. Added to it are the norms (E |q_f| - |E
    q_f|) |k_f|, which account for queries whose directions cancel in the mean.

    Each query head's scores are standardised over the keys; a KV head takes the largest over its query heads (`group`).
    The prompt's own queries are not used. Future positions are text positions, even if M-RoPE gives a key three.
    """

    farthest: PositiveInt = 65536
    group: Literal["max", "mean"] = "max"

    paper: ClassVar[str] = "https://arxiv.org/abs/2604.04921"
    query_window: ClassVar[int] = 0  # asks no query
    future_rotation: ClassVar[bool] = True
    decode_interval: ClassVar[int] = 128
    calibrated: ClassVar[Shapes] = {"mean": ("layers", "heads", "head_dim"), "norms": ("layers", "heads", "rotated")}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        mean, norms = (self.known(name, view, keys.device) for name in ("mean", "norms"))
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        ahead = 1 + 2 ** torch.arange(self.farthest.bit_length(), device=keys.device)  # of each row's last token
        # Rotated keys times rotated queries give the cosines of the series, whatever the positions.
        to_come = mean @ view.future_rotation(ahead, head_dim).mT  # (batch, heads, head_dim)
        scores = to_come.unflatten(1, (kv_heads, -1)) @ keys.float().mT  # (batch, kv_heads, groups, keys)
        rotary = view.rotary
        spread = (norms - rotary.pair_norms(mean)) * rotary.scaling  # the keys' norms are already scaled
        scores = scores + spread.unflatten(0, (kv_heads, -1)) @ rotary.pair_norms(keys).mT
        scores = _standardised(scores, view.real_columns(keys)[:, :, None].expand_as(scores))
        return scores.amax(2) if self.group == "max" else scores.mean(2)

    def gather(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView
    ) -> dict[str, torch.Tensor]:
        before = view.rotary.unrotated(queries)[0].double()  # (heads, queries, head_dim)
        count = torch.tensor(float(before.shape[1]))
        return {"mean": before.sum(1), "norms": view.rotary.pair_norms(before).sum(1), "count": count}

    def known_from(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: sums[name] / sums["count"][:, None, None] for name in self.calibrated}

    @classmethod
    def from_published(cls, path: Path, model: ModelIdentity) -> dict[str, torch.Tensor]:
        """Read the authors' `.pt` file for a model, from their `triattention/calibration/`.

        Real and imaginary parts are the two halves of a head's channels."""
        stats = pickled_in(path)
        try:
            heads = [
                [stats["stats"][f"layer{layer:02d}_head{head:02d}"] for head in range(model.heads)]
                for layer in range(model.layers)
            ]
            means = [[torch.cat([head["q_mean_real"], head["q_mean_imag"]]) for head in layer] for layer in heads]
            norms = [[head["q_abs_mean"] for head in layer] for layer in heads]
            return {"mean": _table(means), "norms": _table(norms)}
        except (LookupError, TypeError, RuntimeError) as error:
            what = " ".join(str(error).split())
            raise KVCompressError(f"{shown(str(path))} does not hold TriAttention's statistics: {what}") from None


def _table(rows: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.stack(row) for row in rows]).float()


def _standardised(scores: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Scale scores (..., keys) to mean 0 and variance 1 over the counted keys."""
    number = counted.sum(-1, keepdim=True).clamp(min=1)
    mean = scores.masked_fill(~counted, 0.0).sum(-1, keepdim=True) / number
    centred = (scores - mean).masked_fill(~counted, 0.0)
    return centred / (centred.square().sum(-1, keepdim=True) / number).sqrt().clamp(min=1e-6)
