"""SparseMM: heads that look at images keep more. https://arxiv.org/abs/2506.05344"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt

from ..calibration.files import ModelIdentity, Shapes
from ..calibration.published import means_by_head
from ..errors import KVCompressError
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.selection import ranks
from ..scoring.vision import observer_counts, observer_queries
from .calibrated import CalibratedKVCluster
from .snapkv import SnapKVCluster


@register_method("sparsemm")
@dataclass(frozen=True)
class SparseMMKVCluster(CalibratedKVCluster):
    """Every head keeps its window and the keys that SnapKV would keep; heads that look at images get more budget.

    `even` of the budget beyond the windows is shared out evenly over all heads of all layers, the rest in proportion to
    their visual scores, summed over the query heads of a KV head (section 3.3; window and pooling as in the code, an
    even tenth as in its scripts). What a head has too few keys for goes to the others.

    In the paper, a query head scores when the key that it attends to most, while the model reads a text in an image,
    lies in that text's box. Boxes need a data set that has them, so `--published` takes the authors' scores. The scores
    that `--task` measures are ours: how often that key is a vision token, for the queries after the last vision token.
    """

    window_size: PositiveInt = 32
    kernel_size: PositiveInt = 5
    pooling: Literal["avg", "max"] = "avg"
    even: Annotated[float, Field(gt=0, le=1)] = 0.1

    paper: ClassVar[str] = "https://arxiv.org/abs/2506.05344"
    layer_budget: ClassVar[str] = "global"
    head_budget: ClassVar[str] = "adaptive"
    safeguard: ClassVar[float] = 0.0
    calibrated: ClassVar[Shapes] = {"scores": ("layers", "heads")}

    def __post_init__(self) -> None:
        SnapKVCluster(self.window_size, self.kernel_size, self.pooling)  # checks them

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        snapkv = SnapKVCluster(self.window_size, self.kernel_size, self.pooling)
        votes = snapkv.score(queries, keys, values, view)
        in_window = votes.isinf()
        place = ranks(votes.masked_fill(in_window, -1.0), view.padding)  # no vote is negative
        # A head with share s keeps the keys with place + 1/2 below s / threshold, that is, s / threshold keys, rounded.
        # The threshold is the same for all heads.
        shares = self.shares(keys.shape[1], view).to(keys.device)
        return (shares[:, None] / (place.float() + 0.5)).masked_fill(in_window, float("inf"))

    def shares(self, kv_heads: int, view: LayerView) -> torch.Tensor:
        """Return each KV head's share of the budget beyond the windows, (kv_heads,); 1 on average over all heads."""
        whole = self.known_whole("scores").unflatten(1, (kv_heads, -1)).sum(2)  # (layers, kv_heads)
        return self.even + (1 - self.even) * (whole / whole.mean())[view.place]

    def gather(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView
    ) -> dict[str, torch.Tensor]:
        hits = torch.zeros(queries.shape[1], device=keys.device)
        if view.vision is None or not view.vision.any():
            return {"hits": hits}
        asking, first = observer_queries(view, keys)[0], keys.shape[2] - max(observer_counts(view))
        for rows, weights in view.attention_blocks(queries, keys, first):
            most = weights[0].argmax(-1).flatten(0, 1)  # (heads, rows)
            hits += (view.vision[0][most] & asking[rows]).sum(1)
        return {"hits": hits}

    def known_from(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not sums["hits"].any():
            raise KVCompressError("no head attends most to an image: use prompts with images, --task")
        return {"scores": sums["hits"] / sums["hits"].sum()}

    @classmethod
    def from_published(cls, path: Path, model: ModelIdentity) -> dict[str, torch.Tensor]:
        """Read the authors' JSON file for a model, from `visual_head/head_score/`: "layer-head" -> samples' scores."""
        scores = means_by_head(path, model.heads, model.layers)
        return {"scores": scores / scores.sum()}
