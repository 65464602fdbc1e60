"""Fast KVzip: KVzip's scores, predicted by a gate from hidden states. https://arxiv.org/abs/2601.17668"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveInt

from ..learned import checkpoints
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .learned import LearnedKVCluster

EPSILON = 1e-6  # in the gate's norms


@register_method("fastkvzip")
@dataclass(frozen=True)
class FastKVzipKVCluster(LearnedKVCluster):
    """Keeps the tokens with the highest scores over all layers and heads, as predicted by a trained gate.

    The gate reads the hidden state that enters the attention. A small query and key of the token compete with learned
    sink keys; the score is the weight that remains for the token, averaged over the query heads of a KV head.

    The first `sinks` tokens stay, and so do the last ones: `window_ratio` of the tokens but at least one, or
    `window_size` if there are 32,000 tokens or more. `checkpoint` is a local file or one on the hub, such as
    Jang-Hyun/Fast-KVzip/qwen3-8b/q4_dim16_sink16.pt; gates fit only the model that they were trained for.
    """

    sinks: NonNegativeInt = 4
    window_ratio: Annotated[float, Field(ge=0, le=1)] = 0.02
    window_size: PositiveInt = 4096

    paper: ClassVar[str] = "https://arxiv.org/abs/2601.17668"
    query_window: ClassVar[int] = 0  # `window_size` counts tokens, not queries
    layer_budget: ClassVar[str] = "global"
    head_budget: ClassVar[str] = "adaptive"
    safeguard: ClassVar[float] = 0.0

    @staticmethod
    def trained(checkpoint: str) -> checkpoints.Trained:
        return checkpoints.fastkvzip(checkpoint)

    def scores_of(self, hidden: torch.Tensor, weights: checkpoints.Weights) -> torch.Tensor:
        heads, _, _, size = weights["k_base"].shape
        queries = F.linear(hidden, weights["q_proj.weight"], weights["q_proj.bias"]).unflatten(-1, (heads, -1, size))
        keys = F.linear(hidden, weights["k_proj.weight"]).unflatten(-1, (heads, 1, size))
        queries = F.rms_norm(queries.float(), (size,), weights["q_norm.weight"].float(), EPSILON)
        keys = F.rms_norm(keys.float(), (size,), weights["k_norm.weight"].float(), EPSILON)
        logits = (queries * keys).sum(-1) / size**0.5 + weights["b"][:, 0].float()  # (batch, tokens, heads, groups)
        sinks = queries @ weights["k_base"][:, 0].float().mT / size**0.5  # (batch, tokens, heads, groups, sinks)
        return (logits - sinks.logsumexp(-1)).sigmoid().mean(-1).transpose(1, 2)

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        scores = super().score(queries, keys, values, view)
        scores = scores.masked_fill(view.positions(keys) < self.sinks, float("inf"))
        return view.protect_recent(scores, [self._window(tokens) for tokens in view.tokens])

    def _window(self, tokens: int) -> int:
        return max(1, int(tokens * self.window_ratio)) if tokens < 32000 else self.window_size
