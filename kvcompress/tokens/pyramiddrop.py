"""PyramidDrop: in steps, the vision tokens that the last token attends to. https://arxiv.org/abs/2410.17247"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import PositiveInt

from ..errors import KVCompressError
from ..methods import register_method
from .base import TokenMethod, Tokens, at_depth


@register_method("pyramiddrop")
@dataclass(frozen=True)
class PyramidDrop(TokenMethod):
    """Drops, in three steps, the vision tokens that the prompt's last token attends to least.

    At each step a share λ of the tokens stays, so that stages of the model hold 1, λ, λ² and λ³ of them.
    Attention is that of the previous layer, averaged over its heads. The steps come before the layers `steps` of 32,
    and at the same depth in other models (in a short one some coincide).

    `ratio` is the number of vision tokens that a layer holds, averaged over all layers; λ follows from it. The
    published λ = 0.5 is 15 / 32. As the first stage holds all tokens, the ratio cannot be below its share of the
    layers, a quarter.
    """

    steps: tuple[PositiveInt, PositiveInt, PositiveInt] = (8, 16, 24)

    paper: ClassVar[str] = "https://arxiv.org/abs/2410.17247"
    presets: ClassVar[dict[str, dict[str, object]]] = {"half": {"ratio": 15 / 32, "steps": (8, 16, 24)}}

    def layers(self, num_layers: int) -> list[int]:
        return sorted(self._stages(num_layers))

    def _stages(self, num_layers: int) -> dict[int, int]:
        """Map each layer before which tokens are dropped to the number of steps that have come by then."""
        return {at_depth(layer, num_layers): stage for stage, layer in enumerate(sorted(self.steps), 1)}

    def budgets(self, kept: int, vision_tokens: int, num_layers: int) -> list[int]:
        """Return the counts for the λ with which the layers hold `kept` tokens in the mean."""
        stages = self._stages(num_layers)
        starts = sorted(stages)
        spans = [end - start for start, end in zip(starts, [*starts[1:], num_layers], strict=True)]
        wanted = kept * num_layers - starts[0] * vision_tokens  # of all layers behind the first step together
        if kept == vision_tokens:
            return [kept for _ in starts]
        if wanted < sum(spans):
            raise KVCompressError(
                f"pyramiddrop: a mean of {kept} of {vision_tokens} vision tokens over {num_layers} layers cannot be "
                f"kept: {starts[0]} layers hold all of them"
            )

        def counts(share: float) -> list[float]:
            return [max(vision_tokens * share ** stages[start], 1) for start in starts]

        low, high = 0.0, 1.0
        for _ in range(60):
            share = (low + high) / 2
            held = sum(span * count for span, count in zip(spans, counts(share), strict=True))
            low, high = (share, high) if held < wanted else (low, share)
        return [math.floor(count + 1e-6) for count in counts(high)]

    def score(self, tokens: Tokens) -> torch.Tensor:
        return tokens.last_attention()
