"""KVzap: what KVzip would say, foretold by a small model from hidden states. https://arxiv.org/abs/2601.07891"""

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
    """Keeps the last `recent` tokens and those of the highest score that a surrogate, for each layer a linear map or an
    MLP of two layers, foretells for each KV head from the hidden state that the attention is given: the logarithm of
    KVzip's score, without a second reading, in the prompt as while decoding.

    `checkpoint`: a local folder or a hub id, such as nvidia/KVzap-mlp-Qwen3-8B; the surrogates of one model fit no
    other. The paper evicts what is below a threshold; here a budget says how much is kept.
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
