"""Q-Filters: keys projected onto the direction in which queries point. https://arxiv.org/abs/2503.02812"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import NonNegativeInt

from ..calibration.files import ModelIdentity, Shapes
from ..calibration.published import tensors_in
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .calibrated import CalibratedKVCluster


@register_method("q-filters")
@dataclass(frozen=True)
class QFiltersKVCluster(CalibratedKVCluster):
    """Keeps the keys with the largest projection onto their head's filter (section 3.2). Uses no queries.

    A filter is the first right-singular vector of a query head's calibration queries, with the sign in which they
    point, averaged over the query heads of a KV head.

    The authors' cache also keeps a recent window (`preset=code`); their kvpress method keeps none.
    """

    recent: NonNegativeInt = 0

    paper: ClassVar[str] = "https://arxiv.org/abs/2503.02812"
    presets: ClassVar[dict[str, dict[str, object]]] = {"code": {"recent": 64}}
    query_window: ClassVar[int] = 0  # asks no query
    calibrated: ClassVar[Shapes] = {"filters": ("layers", "kv_heads", "head_dim")}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        filters = self.known("filters", view, keys.device)
        return view.protect_recent((keys.float() @ filters[..., None])[..., 0], self.recent)

    def gather(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView
    ) -> dict[str, torch.Tensor]:
        grouped = queries[0].double().unflatten(0, (keys.shape[1], -1))  # (kv_heads, groups, queries, head_dim)
        return {"products": grouped.mT @ grouped, "sum": grouped.sum(2)}

    def known_from(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # The right-singular vectors of the queries are the eigenvectors of their products.
        direction = torch.linalg.eigh(sums["products"]).eigenvectors[..., -1]
        turned = torch.where((direction * sums["sum"]).sum(-1, keepdim=True) < 0, -direction, direction)
        return {"filters": turned.mean(2)}

    @classmethod
    def from_published(cls, path: Path, model: ModelIdentity) -> dict[str, torch.Tensor]:
        """Read the authors' `model.safetensors` for a model, such as nthngdy/Llama-3.1-8B_qfilt's.

        Its filters point away from the queries."""
        return {"filters": -tensors_in(path, "q_filters")["q_filters"].float()}
