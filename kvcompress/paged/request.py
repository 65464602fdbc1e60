"""What is known of one request between two forward passes, beside its pages."""

import copy
from dataclasses import dataclass, field

import torch

from ..cache.memory import Memory
from ..cache.new_tokens import NewTokens
from ..scoring.rotary import Rotary


@dataclass
class LayerState:
    """One layer of it.

    Attributes:
        memory: what later choices need to know; its entries lie in the pages.
        columns: LongTensor (kv_heads, entries), where in the sequence each entry came from, at the latest choice.
        queries: of the prompt's chunks so far, each (1, heads, tokens, head_dim).
    """

    memory: Memory
    columns: torch.Tensor | None = None
    queries: list[torch.Tensor] = field(default_factory=list)


@dataclass(eq=False)
class PagedRequest:
    """One request.

    Attributes:
        prompt: its token ids.
        most: entries that it may hold at once behind its prompt, in each layer and head.
        layers: of the compressed layers, in their order.
        stored: entries that the pages hold.
        is_reading: whether the prompt is not all through; it is held whole until then.
        decoded: tokens since the latest eviction.
        tokens: what is known of the prompt, once it is through.
        rotary: how the prompt's chunks so far are rotated, where the method wants to know.
    """

    prompt: list[int]
    most: int
    layers: list[LayerState]
    stored: int = 0
    is_reading: bool = True
    decoded: int = 0
    tokens: NewTokens | None = None
    rotary: list[Rotary] = field(default_factory=list)

    @property
    def reserved(self) -> int:
        """Entries that it may still come to hold at once."""
        return max(self.most, len(self.prompt)) if self.is_reading else self.most

    def fork(self) -> "PagedRequest":
        """For a request that goes on from the same prompt, which is not yet all through."""
        twin = copy.copy(self)
        twin.layers = [LayerState(layer.memory.fork(), None, list(layer.queries)) for layer in self.layers]
        twin.rotary = list(self.rotary)
        return twin
