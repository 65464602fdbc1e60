"""KVCrush: among the less attended tokens, representatives of each kind. https://arxiv.org/abs/2503.00022"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt

from ..device import on_device
from ..methods import register_method
from ..scoring.heads import token_columns
from ..scoring.layer_view import LayerView
from ..scoring.rows import handles_padding
from ..scoring.selection import ranks
from .base import KVCluster


@register_method("kvcrush")
@dataclass(frozen=True)
class KVCrushCluster(KVCluster):
    """Keeps sinks, recent tokens, the most attended tokens, and representatives of all others.

    A token's score is the attention of the last `window_size` queries. What sinks and recent tokens leave of the budget
    goes to the highest scores, but for the part `representatives`. Tokens of one kind mean the same to the same heads:
    each has a bit per KV head, set if its score is in the head's upper half, and the Hamming distance of its bits to an
    anchor sorts the tokens that a head would evict. Representatives are taken from this order at even steps, of equals
    the first. The `anchor` has all bits unset, or every second one set (`alternating`).

    `preset=vllm` has the sizes for 480 entries that the code in vLLM starts from.
    """

    window_size: PositiveInt = 16
    sinks: NonNegativeInt = 4
    recent: NonNegativeInt = 32
    representatives: Annotated[float, Field(ge=0, le=1)] = 0.25
    anchor: Literal["alternating", "zeros"] = "alternating"

    paper: ClassVar[str] = "https://arxiv.org/abs/2503.00022"
    mixes_heads: ClassVar[bool] = True
    fills_budget: ClassVar[bool] = True
    presets: ClassVar[dict[str, dict[str, object]]] = {"vllm": {"sinks": 32, "recent": 128, "budget": 480}}

    @handles_padding
    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor:
        scores = view.window_attention(queries, keys, self.window_size).sum(3).mean(2)
        return view.protect_sinks(view.protect_recent(scores, self.recent), self.sinks)

    def select(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        scores = self.final_scores(scores, view)
        real = view.real_columns(scores)
        protected = real & (scores >= torch.finfo(scores.dtype).max / 2)
        free = real & ~protected  # (batch, kv_heads, keys)
        places = ranks(scores.masked_fill(~free, -torch.inf))
        distances = self.distances(free & (places < free.sum(-1, keepdim=True) // 2), view)

        room = on_device(view.budgets, scores.device)[:, None] - protected.sum(-1)  # (batch, kv_heads)
        room = room.clamp(min=0).minimum(free.sum(-1))
        wanted = (self.representatives * room.double()).long()
        others = free & (places >= (room - wanted)[..., None])
        chosen = at_even_steps(distances, others, wanted, most=int(max(view.budgets)))
        return super().select(scores.masked_fill(chosen, torch.finfo(scores.dtype).max / 2), view)

    def distances(self, bits: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Return each entry's Hamming distance to the anchor, like `bits` (batch, kv_heads, keys).

        A head that no longer holds a token has no bit for it."""
        columns, end = token_columns(view, bits)
        by_token = bits.new_zeros(*bits.shape[:2], end + 1).scatter(2, columns, bits)
        anchor = torch.arange(bits.shape[1], device=bits.device) % 2 == 1
        if self.anchor == "zeros":
            anchor = torch.zeros_like(anchor)
        differing = (by_token != anchor[:, None]).sum(1, keepdim=True)
        return differing.expand_as(by_token).gather(2, columns)


def at_even_steps(order: torch.Tensor, among: torch.Tensor, wanted: torch.Tensor, most: int) -> torch.Tensor:
    """Choose columns at even steps of an order, its first and last included: bool (batch, kv_heads, keys).

    Args:
        order: whole numbers (batch, kv_heads, keys) by which columns are sorted, of equals the first.
        among: bool (batch, kv_heads, keys), the columns to choose from.
        wanted: how many, LongTensor (batch, kv_heads), no more than there are; `most` is a bound that the host knows.
    """
    columns, count = order.shape[2], among.sum(-1, keepdim=True)
    order = order.masked_fill(~among, torch.iinfo(order.dtype).max).argsort(dim=-1, stable=True)
    step = torch.arange(most, device=order.device)
    places = step * (count - 1) // (wanted[..., None] - 1).clamp(min=1)
    chosen = order.gather(2, places.clamp(min=0, max=columns - 1))
    chosen = chosen.masked_fill(step >= wanted[..., None], columns)  # a column behind the last
    return among.new_zeros(*among.shape[:2], columns + 1).scatter(2, chosen, True)[..., :columns]
