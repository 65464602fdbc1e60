"""CSP: attention within and across modalities, ranked separately. https://arxiv.org/abs/2412.04652"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from ..device import on_device
from ..kernels.column_sums import column_sums
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.selection import top_indices
from ..scoring.vision import DECODED_QUERIES
from ..scoring.windows import pad_columns, protect_recent, window_attention
from .base import KVCluster

Share = Annotated[float, Field(ge=0, le=1)]
# MileBench data sets with a `cross_ratio` of 0.1; it is 0.5 for data sets without a preset.
TENTH = (
    "actionlocalization",
    "actionsequence",
    "clevr-change",
    "counterfactualinference",
    "docvqa",
    "scenetransition",
)


@register_method("csp")
@dataclass(frozen=True)
class CSPKVCluster(KVCluster):
    """Keeps recent tokens and the keys that they attend to, ranked within and across modalities (section 3.2).

    Recent tokens get `recent` of the budget. `cross` of the rest goes to the keys that queries of the other modality
    attend to most, what remains to those that queries of the same modality attend to most. The softmax has 1 added to
    its denominator, so a query may attend to nothing (section 3.3, equation 7, n = 1).

    The authors' code sets `cross` for each MileBench data set, mostly to 0.5. For two of them it also sets
    `recent_bias`, the number of recent tokens that stay per recent query (configs/7b.yaml: cross_ratio,
    kv_recent_bias). These are the presets. With `cross=0` their code takes 1 and 308 keys whatever the budget; here all
    keys go by the first ranking. A key that both rankings would take counts once, so the budget is exact; the code
    stores it twice. If no recent query attends across modalities (in a text-only prompt, say), the second share also
    goes by the first ranking. While decoding, all tokens count as text and at most the last 16 queries vote; the code
    evicts nothing then.
    """

    recent: Share = 0.5
    cross: Share = 0.5
    recent_bias: Annotated[float, Field(gt=0)] = 1.0

    paper: ClassVar[str] = "https://arxiv.org/abs/2412.04652"
    presets: ClassVar = {
        **{name: {"cross": 0.1} for name in TENTH},
        **{name: {"cross": 0.9} for name in ("spot-the-diff", "multimodalqa", "webqa")},
        "actionprediction": {"cross": 0.0},
        "slidevqa": {"recent_bias": 0.5},
        "egocentricnavigation": {"recent_bias": 1.5},
    }
    whole_prompt: ClassVar[bool] = True
    query_window: ClassVar[int] = DECODED_QUERIES

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        columns = keys.shape[2]
        windows = [max(1, int(self.recent * budget)) for budget in view.budgets]
        own, cross = votes(queries, keys, view, windows)
        if view.settings.head_budget == "shared":
            own, cross = (of_heads.mean(1, keepdim=True).expand_as(of_heads) for of_heads in (own, cross))
        stay = [min(max(1, int(window * self.recent_bias)), n) for window, n in zip(windows, view.budgets, strict=True)]
        if view.padding is not None:  # votes for nothing went to a pad
            cross = cross.masked_fill(pad_columns(view.padding, columns), 0.0)
        cross = torch.where(cross.any(-1, keepdim=True), cross, own)
        rest = [budget - n for budget, n in zip(view.budgets, stay, strict=True)]
        by_own = [n - min(n, max(1, int(self.cross * n))) if self.cross else n for n in rest]
        before = protect_recent(-own, stay).neg()  # -inf in the window, which stays anyway
        first = top_indices(before, by_own, view.padding)
        chosen = torch.zeros(*keys.shape[:2], columns + 1, dtype=torch.bool, device=keys.device)
        chosen.scatter_(-1, first.masked_fill(first < 0, columns), True)  # unused slots: a column that is cut off
        above = cross.amax(-1, keepdim=True) + 1 + own  # what the first ranking chose, before all others
        return protect_recent(torch.where(chosen[..., :columns], above, cross), stay)


def votes(
    queries: torch.Tensor, keys: torch.Tensor, view: LayerView, windows: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention from the last `windows[row]` queries of a key's own modality, and of the other one.

    Both results are (batch, kv_heads, keys). A zero key before a row's first key adds 1 to each softmax's denominator,
    as its logit is 0.
    """
    padding = view.padding
    keys = F.pad(keys, (0, 0, 1, 0))
    if padding is not None:  # the last pad becomes the zero key
        keys = keys.masked_fill(pad_columns(padding + 1, keys.shape[2])[..., None], 0.0)
    sizes = on_device(windows, keys.device)[:, None]
    if view.is_decoding:
        columns = F.pad(view.stored.columns, (1, 0), value=-1)
        weights = window_attention(queries, keys, queries.shape[2], view.scaling, padding, columns, view.stored.seen)
        voting = torch.arange(weights.shape[3], 0, -1, device=keys.device) <= sizes
        own = (weights * voting[:, None, None, :, None]).sum(3).mean(2)[..., 1:]
        return own, torch.zeros_like(own)
    queries = F.pad(queries, (0, 0, 1, 0))
    voting = torch.arange(keys.shape[2], 0, -1, device=keys.device) <= sizes
    if view.vision is None:
        own = column_sums(queries, keys, view.scaling, padding, voting)[..., 1:]
        return own, torch.zeros_like(own)
    is_vision = F.pad(view.vision, (1, 0))
    of_text, of_vision = (
        column_sums(queries, keys, view.scaling, padding, voting & kind)[..., 1:] for kind in (~is_vision, is_vision)
    )
    at_vision = view.vision[:, None]
    return torch.where(at_vision, of_vision, of_text), torch.where(at_vision, of_text, of_vision)
