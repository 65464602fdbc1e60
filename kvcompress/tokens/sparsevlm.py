"""SparseVLM: vision tokens that the question's telling words attend to. https://arxiv.org/abs/2410.04417"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveInt

from ..kernels.column_sums import column_sums
from ..methods import register_method
from .base import TokenMethod, Tokens

# In front of which of 32 layers the released code drops tokens (by the attention of layers 2, 6 and 15, counted from
# 0), and how many of 576 it then keeps to keep 192 in the mean.
PUBLISHED_LAYERS, PUBLISHED_COUNTS = (3, 7, 16), (300, 200, 110)
NEIGHBOURS = 5  # of a token, for the density around it


@register_method("sparsevlm")
@dataclass(frozen=True)
class SparseVLM(TokenMethod):
    """Drops vision tokens in three steps: those to which the raters attend least in the layer before, in the mean over
    raters and heads (section 3.2). Raters are the text tokens behind the last image that the image's embeddings are
    more like than is usual, by softmax(H_v H_t) averaged over the vision tokens (section 3.1).

    The steps lie behind layers 2, 6 and 15 of 32, and in other models at the same depth (in a short one some coincide).
    `ratio` is the mean over the layers behind the first step; the steps keep vision tokens as 300 : 200 : 110, each at
    most all. Of what a step drops, the best `recycle` are not lost: they are clustered around a tenth as many density
    peaks (section 3.3), and each peak's token becomes the mean of its cluster. These tokens are part of the budget.
    """

    recycle: Annotated[float, Field(ge=0, le=1)] = 0.3
    tokens_per_cluster: PositiveInt = 10

    paper: ClassVar[str] = "https://arxiv.org/abs/2410.04417"

    def layers(self, num_layers: int) -> list[int]:
        return sorted(_steps(num_layers))

    def budgets(self, kept: int, vision_tokens: int, num_layers: int) -> list[int]:
        steps = _steps(num_layers)
        starts = sorted(steps)
        spans = [end - start for start, end in zip(starts, [*starts[1:], num_layers], strict=True)]
        weights = [steps[start] for start in starts]

        def counts(scale: float) -> list[float]:
            return [min(scale * weight, vision_tokens) for weight in weights]

        low, high = 0.0, vision_tokens / min(weights)
        for _ in range(100):
            middle = (low + high) / 2
            total = sum(span * count for span, count in zip(spans, counts(middle), strict=True))
            low, high = (middle, high) if total < kept * sum(spans) else (low, middle)
        return [max(math.floor(count + 0.5), min(kept, 1)) for count in counts(high)]

    def prepare(self, tokens: Tokens) -> torch.Tensor:
        """The raters: bool (batch, tokens). A row with no text behind its last image is rated by its last token."""
        raters = torch.zeros_like(tokens.vision)
        for row, vision in enumerate(tokens.vision):
            columns = vision.nonzero()[:, 0]
            if not len(columns) or columns[-1] == len(vision) - 1:
                raters[row, -1] = True
                continue
            text = tokens.hidden[row, columns[-1] + 1 :].float()
            affinity = torch.zeros(len(text), device=text.device)
            for part in columns.split(1024):  # never all pairs at once
                affinity += (tokens.hidden[row, part].float() @ text.T).softmax(1).sum(0)
            raters[row, columns[-1] + 1 :] = affinity >= affinity.mean()
        return raters

    def score(self, tokens: Tokens) -> torch.Tensor:
        attention, raters = tokens.attention, tokens.prepared
        sums = column_sums(attention.queries, attention.keys, attention.scaling, tokens.padding, raters).mean(1)
        return sums / raters.sum(1, keepdim=True)

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        recycled, clusters = [], []
        for budget, left in zip(tokens.budgets, tokens.vision.sum(1).tolist(), strict=True):
            recycled.append(int(self.recycle * (left - budget)) if budget > 1 else 0)
            clusters.append(min(recycled[-1] // self.tokens_per_cluster + 1, budget - 1) if recycled[-1] else 0)
        sizes = list(zip(tokens.budgets, clusters, recycled, strict=True))
        chosen = tokens.best(scores, [budget - count for budget, count, _ in sizes])
        second = tokens.best(scores, [budget - count + more for budget, count, more in sizes]) & ~chosen
        hidden = tokens.hidden.clone()
        for row, count in enumerate(clusters):
            if count:
                columns = second[row].nonzero()[:, 0]
                states = tokens.hidden[row, columns].float()
                peaks, cluster = density_peaks(states, count)
                sums = torch.zeros(count, states.shape[1], device=states.device).index_add_(0, cluster, states)
                hidden[row, columns[peaks]] = (sums / cluster.bincount(minlength=count)[:, None]).to(hidden.dtype)
                chosen[row, columns[peaks]] = True
        return chosen, hidden


def density_peaks(states: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Clusters of `states` (tokens, size) around `count` peaks, which are dense and far from anything denser.

    Returns:
        the peaks (count,), and for each token which peak is nearest (tokens,).
    """
    distances = torch.cdist(states, states) / states.shape[1] ** 0.5
    nearest = distances.topk(min(NEIGHBOURS, len(states)), largest=False).values
    density = nearest.square().mean(1).neg().exp()
    denser = density > density[:, None]  # [i, j]: j is denser than i
    apart = distances.masked_fill(~denser, float("inf")).amin(1)
    apart = torch.where(apart.isinf(), distances.max(), apart)  # the densest of all
    peaks = (apart * density).topk(count).indices
    cluster = distances[:, peaks].argmin(1)
    cluster[peaks] = torch.arange(count, device=states.device)
    return peaks, cluster


def _steps(num_layers: int) -> dict[int, int]:
    """Decoder layer in front of which tokens are dropped -> the share that is kept from there on."""
    steps = {}
    for layer, count in zip(PUBLISHED_LAYERS, PUBLISHED_COUNTS, strict=True):
        steps[min(max(math.floor(layer * num_layers / 32 + 0.5), 1), num_layers - 1)] = count
    return steps
