"""A first prompt whose prefix was computed before: only the rest passes through the model."""

from collections.abc import Callable

import torch

from .choice import Choice
from .memory import Memory
from .new_tokens import NewTokens
from .phases import EVERY, Decoding, KeysAndValues, Prefill, causal

# Queries (batch, heads, columns, head_dim), keys and values (batch, kv_heads, columns, head_dim) of a prompt's first
# columns; created when a layer is reached, so that memory holds one layer's. Queries are None before a prompt's last
# piece, as nothing is chosen yet.
Beginning = Callable[[], tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]]


class ResumedPrefill(Prefill):
    """A first prompt whose first `known` columns come from `beginning`; the rest passes through the layer.

    The whole prompt is compressed, as if all of it had passed through the layer."""

    wants_sums = False  # all queries' sums are computed after the attention of the last piece

    def __init__(
        self, choice: Choice, memory: Memory, tokens: NewTokens, then: Decoding, known: int, beginning: Beginning
    ):
        super().__init__(choice, memory, tokens, then)
        self.is_first_prompt = False  # the model's own mask has a row for each column
        self._known, self._beginning, self._known_queries = known, beginning, None

    @property
    def length(self) -> int:
        return self._known if self.staged is None else self.tokens.columns

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
        if not self._known:
            return super().update(keys, values)
        known = (None if part is None else part.to(keys.device) for part in self._beginning())
        self._known_queries, known_keys, known_values = known
        return super().update(torch.cat([known_keys, keys], dim=2), torch.cat([known_values, values], dim=2))

    def mask(self, query_length: int, rows: slice = EVERY) -> torch.Tensor:
        columns, device = self.tokens.columns, self.staged[0].device
        return causal(query_length, columns, self.tokens.pads(columns, device), device, rows)[:, None]

    def all_queries(self, queries: torch.Tensor) -> torch.Tensor:
        known, self._known_queries = self._known_queries, None
        return queries if known is None else torch.cat([known, queries], dim=2)
