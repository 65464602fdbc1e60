"""The state of one request between two forward passes, apart from its pages."""

import copy
from dataclasses import dataclass, field

import torch

from ..cache.memory import Memory
from ..cache.new_tokens import NewTokens
from ..scoring.rotary import Rotary


@dataclass
class LayerState:
    """A request's state in one layer.

    Attributes:
        memory: what later choices need; the entries themselves are in the pages.
        columns: LongTensor (kv_heads, entries), each entry's column in the sequence, at the latest choice.
        queries: queries of the prompt's chunks so far, each (1, heads, tokens, head_dim).
    """

    memory: Memory
    columns: torch.Tensor | None = None
    queries: list[torch.Tensor] = field(default_factory=list)


@dataclass(eq=False)
class PagedRequest:
    """One request.

    Attributes:
        prompt: its token ids.
        most: the most entries that it may hold at once after its prompt, in each layer and head.
        layers: the state in each compressed layer, in order.
        stored: number of entries in the pages.
        is_reading: whether chunks of the prompt are missing; until then the prompt is kept whole.
        decoded: tokens since the latest eviction.
        tokens: facts about the prompt, after its last chunk.
        rotary: the rotation of the prompt's chunks so far, if the method needs it; after the last one, of all.
        known_rotation: that of a prefix that other requests have computed, before the first chunk is read.
        states: for a prefix cache, queries, keys and values of the whole prompt in each layer so far,
            (heads, tokens, head_dim).
    """

    prompt: list[int]
    most: int
    layers: list[LayerState]
    stored: int = 0
    is_reading: bool = True
    decoded: int = 0
    tokens: NewTokens | None = None
    rotary: list[Rotary] = field(default_factory=list)
    known_rotation: list[torch.Tensor] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)

    @property
    def reserved(self) -> int:
        """The most entries that it may still hold at once."""
        return max(self.most, len(self.prompt)) if self.is_reading else self.most

    def fork(self) -> "PagedRequest":
        """Return a copy for a request that continues from the same prompt before its last chunk."""
        twin = copy.copy(self)
        twin.layers = [LayerState(layer.memory.fork(), None, list(layer.queries)) for layer in self.layers]
        twin.rotary, twin.states = list(self.rotary), list(self.states)
        return twin
