"""KVzap: KVzip's scores, predicted by a small model from hidden states. https://arxiv.org/abs/2601.07891"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt

from ..learned import checkpoints
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .learned import LearnedKVCluster


@register_method("kvzap")
@dataclass(frozen=True)
class KVzapKVCluster(LearnedKVCluster):
    """Keeps the last `recent` tokens and those with the highest predicted KVzip scores.

    A surrogate per layer, a linear map or a two-layer MLP, predicts the logarithm of each KV head's KVzip score from
    the hidden state that enters the attention. It needs no second pass and works the same in prefill and decoding.

    `checkpoint` is a local folder or a hub id, such as nvidia/KVzap-mlp-Qwen3-8B; surrogates fit only the model that
    they were trained for. The paper evicts tokens below a threshold; here a budget says how many are kept.
    """

    recent: NonNegativeInt = 128

    paper: ClassVar[str] = "https://arxiv.org/abs/2601.07891"

    @staticmethod
    def trained(checkpoint: str) -> checkpoints.Trained:
        return checkpoints.kvzap(checkpoint)

    def scores_of(self, hidden: torch.Tensor, weights: checkpoints.Weights) -> torch.Tensor:
        if "weight" in weights:
            scores = F.linear(hidden, weights["weight"], weights["bias"])
        else:
            inner = F.gelu(F.linear(hidden, weights["0.weight"], weights["0.bias"]))
            scores = F.linear(inner, weights["2.weight"], weights["2.bias"])
        return scores.transpose(1, 2)

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return view.protect_recent(super().score(queries, keys, values, view), self.recent)
