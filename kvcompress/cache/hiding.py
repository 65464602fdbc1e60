"""Vision tokens hidden from later layers in a decode step, for token methods that choose again at each step."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..scoring.layer_view import Kept
from ..scoring.windows import window_logits
from ..tokens.base import TokenMethod
from .memory import Memory


class Hiding:
    """The stored vision tokens of one cache that the layers from `first_layer` on do not see in the current decode
    step.

    They are chosen by the attention of the layer before `first_layer`. All tokens stay stored in every layer, so any of
    them may be visible again in the next step.

    Attributes:
        hidden: bool (batch, slots), True at hidden slots; None if the sequence has no vision token.
    """

    def __init__(self, method: TokenMethod, first_layer: int):
        self._method, self.first_layer = method, first_layer
        self.hidden: torch.Tensor | None = None

    def choose(
        self, memory: Memory, entries: Callable[[], Kept], seen: int, queries: torch.Tensor, scaling: float
    ) -> None:
        """Choose the hidden tokens from the queries (batch, heads, 1, head_dim) of the layer before, which holds these
        `entries` of `seen` tokens."""
        self.hidden = None
        if not memory.log.has_vision:
            return
        kept, vision = entries(), memory.log.vision
        columns = kept.indices[:, 0]
        is_vision = F.pad(vision, (0, seen - vision.shape[1])).to(columns.device)
        is_vision = is_vision.gather(1, columns.clamp(min=0)) & (columns >= 0)
        logits = window_logits(queries, kept.keys, 1, scaling)
        logits.masked_fill_((kept.indices < 0)[:, :, None, None], float("-inf"))
        attention = logits.softmax(-1).mean((1, 2))[:, 0]
        before = memory.attended
        if before is not None:
            before = F.pad(before, (0, attention.shape[1] - before.shape[1]))
        memory.attended = attention
        self.hidden = self._method.hide(attention, is_vision, before)
