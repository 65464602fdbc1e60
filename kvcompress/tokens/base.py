"""What a token method is: a `TokenMethod` that chooses the vision tokens which go on through the language model."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from ..methods import Method
from ..scoring.selection import top_indices
from ..scoring.windows import pad_columns

Sees = Literal["embeddings", "attention", "tower", "frames"]


@dataclass(frozen=True)
class Attention:
    """A decoder layer's rotated queries (batch, heads, tokens, head_dim), its keys (batch, kv_heads, tokens, head_dim),
    and the factor of q·k before the softmax."""

    queries: torch.Tensor
    keys: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class Tower:
    """What the vision tower made of the prompt's tokens.

    Attributes:
        received: the attention that each received in one of its layers, (batch, columns) in fp32, -inf where there is
            no patch (text, newlines); see `TokenMethod.received`.
        keys: that layer's, (batch, columns, heads, head_dim).
        features: what the model projects, (batch, columns, tower_size).
        classes: of each row, the states of its tiles' class tokens, (tiles, tower_size), on their way to the projector
            although the model leaves them out; empty where the tower has none.
        project: the projector, (..., tower_size) -> (..., hidden_size).
    """

    received: torch.Tensor
    keys: torch.Tensor
    features: torch.Tensor
    classes: list[torch.Tensor]
    project: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Tokens:
    """The tokens that are left where a method chooses among them, and what it may know of them.

    Attributes:
        vision: bool (batch, tokens), True at vision tokens.
        padding: LongTensor (batch, 1) of leading places that hold nothing, or None where there are none.
        budgets: vision tokens to keep, one number per row.
        hidden: their hidden states on the way into the decoder layer in front of which tokens are dropped,
            (batch, tokens, hidden_size); None while the layer before it attends.
        attention: for `sees="attention"`: that of the decoder layer before.
        tower: for `sees="tower"`: that of the vision tower.
        frames: for `sees="frames"`: of each row, of each video, the columns of its frames' tokens (frames, tokens).
        prepared: what `TokenMethod.prepare` returned, of the tokens that are left.
        counts: of each row, the vision tokens of the prompt, and those that each choice so far has left.
        num_layers: the model's decoder layers.
    """

    vision: torch.Tensor
    padding: torch.Tensor | None
    budgets: list[int]
    hidden: torch.Tensor | None = None
    attention: Attention | None = None
    tower: Tower | None = None
    frames: list[list[torch.Tensor]] | None = None
    prepared: torch.Tensor | None = None
    counts: list[list[int]] | None = None
    num_layers: int = 0

    @property
    def real(self) -> torch.Tensor:
        """bool (batch, tokens), False at places that hold nothing."""
        if self.padding is None:
            return torch.ones_like(self.vision)
        return ~pad_columns(self.padding, self.vision.shape[1])[:, 0]

    def best(self, scores: torch.Tensor, budgets: list[int] | None = None) -> torch.Tensor:
        """The vision tokens with the highest scores (batch, tokens), `budgets[row]` of each row or all that may stay:
        bool (batch, tokens). Among equals the later wins. The prompt's last token goes before all others where it is a
        vision token: the answer is read off it."""
        scores = scores.float().clamp(min=torch.finfo(torch.float32).min)
        scores[:, -1] = float("inf")
        scores = scores.masked_fill(~self.vision, float("-inf"))
        kept = top_indices(scores[:, None], self.budgets if budgets is None else budgets)[:, 0]
        chosen = F.pad(torch.zeros_like(self.vision), (0, 1))  # -1, no token, becomes a column that is cut off
        return chosen.scatter_(1, kept.remainder(chosen.shape[1]), True)[:, :-1]


class TokenMethod(Method, ABC):
    """Chooses vision tokens to drop, so that the layers behind the choice run, and cache, a shorter prompt.

    A dataclass that derives from this; its fields are its options. `ratio` is the fraction of each row's vision tokens
    that is kept; all else stays. Kept tokens keep their positions.

    Attributes:
        sees: what the choice is made from: `embeddings`: the prompt's; `attention`: that of the decoder layer before
            it; `tower`: that of the vision tower; `frames`: the embeddings of a video's frames.
    """

    sees: ClassVar[Sees] = "attention"

    @property
    def sets_budgets(self) -> bool:
        """Whether the method decides how many tokens stay; a budget is then the most that may."""
        return False

    @abstractmethod
    def layers(self, num_layers: int) -> list[int]:
        """The decoder layers in front of which tokens are dropped, ascending; 0: before the language model."""

    def budgets(self, kept: int, vision_tokens: int, num_layers: int) -> list[int]:
        """Vision tokens kept from each of `layers` on, where `kept` of `vision_tokens` are asked for."""
        return [kept for _ in self.layers(num_layers)]

    def hides_from(self, num_layers: int) -> int | None:
        """The decoder layer from which on a decode step sees some of the vision tokens only; None: all see all."""
        return None

    def hide(self, attention: torch.Tensor, vision: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Of the stored entries those that the layers from `hides_from` on do not see at a decode step: bool
        (batch, entries).

        Args:
            attention: the new token's in the layer before, in the mean over heads, (batch, entries) in fp32.
            vision: bool (batch, entries), True at vision tokens.
            before: `attention` of the step before, None at a prompt's first.
        """
        return torch.zeros_like(vision)

    def prepare(self, tokens: Tokens) -> torch.Tensor | None:
        """What the method wants to remember of each token's embedding (batch, tokens, ...), or None."""
        return None

    def received(self, queries: torch.Tensor, keys: torch.Tensor, has_class: bool) -> torch.Tensor:
        """For `sees="tower"`: what each patch of a tile receives in the tower's layer `tower_layer`, by its queries and
        keys (tokens, heads, head_dim): (patches,) in fp32."""
        return received_attention(queries, keys, has_class)

    @abstractmethod
    def score(self, tokens: Tokens) -> torch.Tensor:
        """How much each token is worth, (batch, tokens) in fp32. What stands at text and pads does not matter."""

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """The vision tokens that stay, bool (batch, tokens), `tokens.budgets[row]` of them in each row (another number
        where the method `sets_budgets`, or shares its budget out over layers as it goes); and the hidden states
        (batch, tokens, hidden_size), changed where something is merged into those that stay."""
        return tokens.best(scores), tokens.hidden


def received_attention(queries: torch.Tensor, keys: torch.Tensor, has_class: bool) -> torch.Tensor:
    """What each patch of a tile receives, averaged over the heads: from the class token, which comes first, or where
    the tower has none from all patches in the mean. queries, keys (tokens, heads, head_dim); the result, in fp32, is
    (patches,) and sums to at most 1."""
    asking = queries[:1] if has_class else queries
    logits = torch.einsum("qhd,khd->hqk", asking.float(), keys.float()) * queries.shape[-1] ** -0.5
    return logits.softmax(-1).mean((0, 1))[int(has_class) :]
