"""SimLayerKV: lazy layers keep little. https://arxiv.org/abs/2410.13846"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt

from ..methods import register_method
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from .base import KVCluster
from .streamingllm import sinks_and_recent


@register_method("simlayerkv")
@dataclass(frozen=True)
class SimLayerKVCluster(KVCluster):
    """Keeps the first `sinks` tokens and the most recent ones, fewer in lazy layers (section 3, `layer_budget="lazy"`).

    A layer is lazy if it spends more than `lazy_threshold` of its attention on the first and last tokens (0.9 as
    published for Llama 3; 0.65 for Llama 2, 0.8 for Mistral, 0.85 for Qwen2).

    In the paper a lazy layer keeps 4 + 1024 tokens and every other layer keeps all. Here the layers together keep the
    budget that was asked for: what lazy layers give up goes to the others, as many tokens as fit.

    With `variant="code"` and `"paper"` the budget is that of a lazy layer and every other layer keeps all, so the
    realised ratio depends on the prompt. `"code"` judges a layer by the prompt's last query
    (`layer_budget="lazy-code"`; the released code uses the first decoded one), `"paper"` by its last 32
    (`"lazy-paper"`). The presets are the code's thresholds.
    """

    sinks: NonNegativeInt = 4
    lazy_threshold: Annotated[float, Field(ge=0, le=1)] = 0.9
    variant: Literal["budget", "code", "paper"] = "budget"

    paper: ClassVar[str] = "https://arxiv.org/abs/2410.13846"
    layer_budget: ClassVar[str] = "lazy"
    by_variant: ClassVar[dict[str, dict[str, object]]] = {
        "code": {"layer_budget": "lazy-code"},
        "paper": {"layer_budget": "lazy-paper"},
    }
    presets: ClassVar[dict[str, dict[str, object]]] = {
        model: {"variant": "code", "lazy_threshold": threshold, "budget": 4 + 1024}
        for model, threshold in (("llama-2", 0.65), ("llama-3", 0.9), ("mistral", 0.8), ("qwen2", 0.85))
    }
    query_window: ClassVar[int] = 0  # asks no query

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        return sinks_and_recent(keys, self.sinks, view.padding)
