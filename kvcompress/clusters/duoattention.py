"""DuoAttention: some heads keep everything, the others sinks and recent tokens. https://arxiv.org/abs/2410.10819"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import NonNegativeInt, PositiveInt

from ..calibration.files import ModelIdentity, Shapes
from ..calibration.published import numbers_in
from ..errors import KVCompressError
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .calibrated import CalibratedKVCluster


@register_method("duoattention")
@dataclass(frozen=True)
class DuoAttentionKVCluster(CalibratedKVCluster):
    """Every KV head keeps the first `sinks` and the last `recent` tokens; retrieval heads keep the whole prompt.

    The rest of the budget goes to the retrieval heads, in the order of their gates over all layers, the highest first
    (section 2; 64 and 256 as deployed in the paper, 128 and 256 in the released patterns). In the paper a threshold
    sets the number of retrieval heads; here the budget does. If it does not suffice for the last of them, or for heads
    with equal gates, these keep their most recent tokens.

    The authors learn the gates by gradient descent, as `kvcompress train duoattention` does; `kvcompress calibrate
    --published full_attention_heads.tsv` takes theirs. `calibrate --text` measures gates of our own, without gradients,
    from the attention of prompts longer than `sinks` and `recent`: the average share that a query spends on the other
    tokens, of the query head that spends most in each KV head.
    """

    sinks: NonNegativeInt = 64
    recent: PositiveInt = 256

    paper: ClassVar[str] = "https://arxiv.org/abs/2410.10819"
    presets: ClassVar[dict[str, dict[str, object]]] = {"patterns": {"sinks": 128, "recent": 256}}
    layer_budget: ClassVar[str] = "global"
    head_budget: ClassVar[str] = "adaptive"
    safeguard: ClassVar[float] = 0.0
    query_window: ClassVar[int] = 0  # asks no query
    calibrated: ClassVar[Shapes] = {"gates": ("layers", "kv_heads")}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        gates = self.known("gates", view, keys.device).clamp(0, 1)
        columns = keys.shape[2]
        age = torch.arange(columns - 1, -1, -1, dtype=torch.float32, device=keys.device)
        # Streaming tokens come before all gates: sinks in their order, then recent tokens, the latest first.
        scores = torch.where(age < self.recent, 2 - age / self.recent, gates[:, None]).expand(keys.shape[:3])
        position = view.positions(keys)
        scores = torch.where(position < self.sinks, 3 - position / max(self.sinks, 1), scores)
        return view.protect_recent(scores, 1)

    def gather(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView
    ) -> dict[str, torch.Tensor]:
        near, columns = self.sinks + self.recent, keys.shape[2]
        spent = torch.zeros(keys.shape[1], queries.shape[1] // keys.shape[1], device=keys.device)
        column = torch.arange(columns, device=keys.device)
        for rows, weights in view.attention_blocks(queries, keys, near):
            elsewhere = (column >= self.sinks) & (column <= column[rows, None] - self.recent)
            spent += (weights[0] * elsewhere[:, : rows.stop]).sum((2, 3))
        return {"spent": spent, "queries": torch.tensor(float(max(columns - near, 0)))}

    def known_from(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not sums["queries"].any():
            raise KVCompressError(
                f"no prompt has more than sinks + recent = {self.sinks + self.recent} tokens, so nothing tells the "
                "heads apart: use longer prompts, or smaller sinks= and recent="
            )
        return {"gates": (sums["spent"] / sums["queries"][:, None, None]).amax(2)}

    @classmethod
    def from_published(cls, path: Path, model: ModelIdentity) -> dict[str, torch.Tensor]:
        """Read the authors' `full_attention_heads.tsv` for a model, from their `attn_patterns/`: one line per layer."""
        return {"gates": numbers_in(path).float().clamp(0, 1)}
