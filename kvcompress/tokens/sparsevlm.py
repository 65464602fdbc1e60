"""SparseVLM: vision tokens that the question's relevant words attend to. https://arxiv.org/abs/2410.04417"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveInt

from ..errors import KVCompressError
from ..kernels.column_sums import column_sums
from ..methods import register_method
from ..scoring.density import density_peaks
from .base import TokenMethod, Tokens, at_depth

# The layers (of 32) before which the released code drops tokens, by the attention of the previous layer.
PUBLISHED_LAYERS = (3, 7, 16)


@register_method("sparsevlm")
@dataclass(frozen=True)
class SparseVLM(TokenMethod):
    """Drops, in three steps, the vision tokens that the raters attend to least (section 3.2).

    Attention is that of the previous layer, averaged over raters and heads. Raters are the text tokens after the last
    image whose similarity to the image's embeddings, softmax(H_v H_t) averaged over the vision tokens, is at least the
    mean (section 3.1).

    The steps come after layers 2, 6 and 15 of 32, and at the same depth in other models (in a short one some coincide).
    They keep vision tokens in the proportions of `counts`, 300 : 200 : 110, and each drops at least one. Of the dropped
    tokens, the best `recycle` are not lost: they are clustered around a tenth as many density peaks (section 3.3), and
    each peak's token becomes the mean of its cluster. These tokens are part of the budget.

    `ratio` is the number of vision tokens that leave a layer, averaged over all layers including those before the first
    step, as the authors count ("192" of 576). Of 32 layers two pass on all tokens, so it cannot be below 1 / 16. It
    follows the released code (modelling_sparse_llama.py, version 1.5), which has fixed counts; in the paper the rank of
    the attention sets them.
    """

    recycle: Annotated[float, Field(ge=0, le=1)] = 0.3
    tokens_per_cluster: PositiveInt = 10
    counts: tuple[PositiveInt, PositiveInt, PositiveInt] = (300, 200, 110)

    paper: ClassVar[str] = "https://arxiv.org/abs/2410.04417"
    presets: ClassVar[dict[str, dict[str, object]]] = {  # score.py; of 576 tokens
        "192": {"budget": 192, "counts": (300, 200, 110)},
        "128": {"budget": 128, "counts": (303, 110, 36)},
        "96": {"budget": 96, "counts": (238, 48, 26)},
        "64": {"budget": 64, "counts": (66, 30, 17)},
    }

    def layers(self, num_layers: int) -> list[int]:
        return sorted(self._steps(num_layers))

    def budgets(self, kept: int, vision_tokens: int, num_layers: int) -> list[int]:
        """Return the published counts if their mean, in whole tokens, is `kept`; otherwise multiples of them."""
        steps = self._steps(num_layers)
        starts = sorted(steps)
        # The layer whose attention decides already passes on fewer tokens.
        spans = [end - start for start, end in zip(starts, [*starts[1:], num_layers + 1], strict=True)]
        before = (starts[0] - 1) * vision_tokens
        if kept == 0 or kept == vision_tokens:
            return [kept for _ in starts]
        if kept * num_layers < before + sum(spans):
            raise KVCompressError(
                f"sparsevlm: a mean of {kept} of {vision_tokens} vision tokens over {num_layers} layers cannot be "
                f"kept: {starts[0] - 1} layers hold all of them"
            )

        def totals(scale: float) -> list[int]:
            found, left = [], vision_tokens
            for start in starts:
                best = min(math.floor(scale * steps[start] + 0.5), left - 1)
                left = max(best + self._clusters(best, left), 1)
                found.append(left)
            return found

        def mean(counts: list[int]) -> float:
            return (before + sum(span * count for span, count in zip(spans, counts, strict=True))) / num_layers

        if int(mean(totals(1.0))) == kept:
            return totals(1.0)
        low, high = 0.0, vision_tokens / min(steps.values())
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if mean(totals(middle)) < kept else (low, middle)
        return min(totals(low), totals(high), key=lambda counts: abs(mean(counts) - kept))

    def _steps(self, num_layers: int) -> dict[int, int]:
        """Map each decoder layer before which tokens are dropped to the share that is kept from there on."""
        steps = {}
        for layer, count in zip(PUBLISHED_LAYERS, self.counts, strict=True):
            steps[at_depth(layer, num_layers)] = count
        return steps

    def _recycled(self, dropped: int) -> int:
        """Return how many of `dropped` tokens are clustered."""
        return min(int(dropped * self.recycle) + 1, dropped) if self.recycle else 0

    def _clusters(self, best: int, left: int) -> int:
        """Return the number of clusters formed from the tokens that rank below the `best` of `left`; at most `best`."""
        recycled = self._recycled(left - best)
        return min(recycled // self.tokens_per_cluster + 1, recycled, best)

    def _best(self, budget: int, left: int) -> int:
        """Return how many of `left` tokens stay unchanged so that, with the clusters, there are `budget`."""
        fitting = (best for best in range(budget, 0, -1) if best + self._clusters(best, left) <= budget)
        return next(fitting, budget)

    def prepare(self, tokens: Tokens) -> torch.Tensor:
        """Return the raters: bool (batch, tokens). Without text after the last image, a row's last token rates."""
        raters = torch.zeros_like(tokens.vision)
        for row, vision in enumerate(tokens.vision):
            columns = vision.nonzero()[:, 0]
            if not len(columns) or columns[-1] == len(vision) - 1:
                raters[row, -1] = True
                continue
            text = tokens.hidden[row, columns[-1] + 1 :].float()
            affinity = torch.zeros_like(text[:, 0])
            for part in columns.split(1024):  # never all pairs at once
                affinity += (tokens.hidden[row, part].float() @ text.T).softmax(1).sum(0)
            raters[row, columns[-1] + 1 :] = affinity >= affinity.mean()
        return raters

    def score(self, tokens: Tokens) -> torch.Tensor:
        attention, raters = tokens.attention, tokens.prepared
        sums = column_sums(attention.queries, attention.keys, attention.scaling, tokens.padding, raters).mean(1)
        return sums / raters.sum(1, keepdim=True)

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        left = tokens.vision.sum(1).tolist()
        best = [self._best(budget, n) for budget, n in zip(tokens.budgets, left, strict=True)]
        chosen = tokens.best(scores, best)
        rows = zip(best, left, tokens.budgets, strict=True)
        reach = [n if n == budget else n + self._recycled(m - n) for n, m, budget in rows]
        second = tokens.best(scores, reach) & ~chosen
        hidden = tokens.hidden.clone()
        for row, (count, budget) in enumerate(zip(best, tokens.budgets, strict=True)):
            if clusters := budget - count:
                columns = second[row].nonzero()[:, 0]
                states = tokens.hidden[row, columns].float()
                peaks, cluster = density_peaks(states, clusters, clusters)
                sums = states.new_zeros(clusters, states.shape[1]).index_add_(0, cluster, states)
                hidden[row, columns[peaks]] = (sums / cluster.bincount(minlength=clusters)[:, None]).to(hidden.dtype)
                chosen[row, columns[peaks]] = True
        return chosen, hidden
