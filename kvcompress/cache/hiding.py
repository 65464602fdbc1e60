"""What a decode step does not show its later layers, for token methods that choose anew at each step."""

import torch
import torch.nn.functional as F

from ..scoring.windows import window_logits
from ..tokens.base import TokenMethod
from .memory import Memory


class Hiding:
    """Of one cache: which stored vision tokens the layers from `first_layer` on do not see at the decode step under
    way, by the attention of the layer before it. All are still stored, in all layers alike, so that any of them may be
    seen again at the next step.

    Attributes:
        hidden: bool (batch, slots), True at what is hidden; None where the sequence has no vision token.
    """

    def __init__(self, method: TokenMethod, first_layer: int):
        self._method, self.first_layer = method, first_layer
        self.hidden: torch.Tensor | None = None

    def look(self, memory: Memory, queries: torch.Tensor, scaling: float) -> None:
        """Choose by the token's queries (batch, heads, 1, head_dim) in the layer before, which holds `memory`."""
        self.hidden = None
        if not memory.log.has_vision:
            return
        kept, vision = memory.kept(), memory.log.vision
        columns = kept.indices[:, 0]
        is_vision = F.pad(vision, (0, memory.seen - vision.shape[1])).to(columns.device)
        is_vision = is_vision.gather(1, columns.clamp(min=0)) & (columns >= 0)
        logits = window_logits(queries, kept.keys, 1, scaling)
        logits.masked_fill_((kept.indices < 0)[:, :, None, None], float("-inf"))
        attention = logits.softmax(-1).mean((1, 2))[:, 0]
        before = memory.attended
        if before is not None:
            before = F.pad(before, (0, attention.shape[1] - before.shape[1]))
        memory.attended = attention
        self.hidden = self._method.hide(attention, is_vision, before)
