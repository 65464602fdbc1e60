"""R-KV: important tokens that are not repeated later. https://arxiv.org/abs/2505.24133"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt

from ..errors import KVCompressError
from ..kernels.likeness import mean_likeness
from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.windows import pool_scores
from .base import KVCluster


def redundancy(
    keys: torch.Tensor, similar: float, padding: torch.Tensor | None, spares_first: bool = False
) -> torch.Tensor:
    """Measure how similar each key is to all other keys of its KV head (section 3, redundancy estimation).

    The result is the softmax, over the keys, of a key's mean cosine with the others. Of the keys whose cosine exceeds
    `similar`, the latest is left out, so that the latest of several repeated tokens stays.

    Args:
        keys: (batch, kv_heads, keys, head_dim).
        spares_first: if no key exceeds `similar`, leave out the first key (`cal_similarity` in rkv/utils.py).
        padding: as in scoring/windows.py.

    Returns:
        (batch, kv_heads, keys) in fp32, zero at pads.
    """
    return mean_likeness(keys, similar, padding, spares_first).softmax(-1)


@register_method("r-kv")
@dataclass(frozen=True)
class RKVCluster(KVCluster):
    """Keeps the last `window_size` tokens and the most important, least redundant keys (section 3, joint selection).

    The score is `balance` * importance - (1 - `balance`) * redundancy, with a lambda of 0.07 as in run_math.py.
    Importance is the window's pooled attention to the keys before it, by the largest logit of a KV head's query heads.
    Redundancy is the similarity to the other keys. If a key has no similar key, its similarity to the first key is left
    out; with `variant="paper"` it counts. The preset `paper` also has the paper's lambda, 0.1. The method is made for
    long answers: `decode_budget=`.
    """

    window_size: PositiveInt = 8
    kernel_size: PositiveInt = 7
    balance: Annotated[float, Field(ge=0, le=1)] = 0.07
    similar: Annotated[float, Field(ge=0, le=1)] = 0.5
    variant: Literal["code", "paper"] = "code"

    paper: ClassVar[str] = "https://arxiv.org/abs/2505.24133"
    decode_interval: ClassVar[int] = 128
    spares_first: ClassVar[bool] = True
    by_variant: ClassVar[dict[str, dict[str, object]]] = {"paper": {"spares_first": False}}
    presets: ClassVar[dict[str, dict[str, object]]] = {"paper": {"variant": "paper", "balance": 0.1}}

    def __post_init__(self) -> None:
        if self.kernel_size % 2 == 0:
            raise KVCompressError(f"kernel_size={self.kernel_size} is even: pooling is centred, so it must be odd")

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        window = min(self.window_size, keys.shape[2])
        logits = view.window_logits(queries, keys, window, hides_window=True)
        weights = logits.amax(2).softmax(-1)  # (batch, kv_heads, window, keys)
        # NaN: a pad's query, which has no vote, or no token before the window.
        importance = pool_scores(weights.nanmean(2).nan_to_num(0.0), self.kernel_size, "max")
        repeated = redundancy(keys, self.similar, view.padding, spares_first=self.of_variant("spares_first"))
        return view.protect_recent(self.balance * importance - (1 - self.balance) * repeated, window)
