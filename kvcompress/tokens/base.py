"""`TokenMethod`, the base class of methods that choose which vision tokens the language model processes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from ..errors import KVCompressError
from ..methods import Method
from ..scoring.budget import allocate
from ..scoring.returned import checked_token_scores, shape_of
from ..scoring.selection import top_indices
from ..scoring.windows import pad_columns, window_attention

Sees = Literal["embeddings", "attention", "tower", "frames", "video"]


@dataclass(frozen=True)
class Attention:
    """A decoder layer's rotated queries and keys.

    Attributes:
        queries: (batch, heads, tokens, head_dim).
        keys: (batch, kv_heads, tokens, head_dim).
        scaling: factor of q·k before the softmax.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class Tower:
    """The vision tower's states of the prompt's tokens.

    Attributes:
        received: the attention that each token received in one tower layer, (batch, columns) in fp32; -inf where there
            is no patch (text, newlines). See `TokenMethod.received`.
        keys: that layer's keys, (batch, columns, heads, head_dim).
        features: the input of the projector, (batch, columns, tower_size).
        classes: for each row, the states of its tiles' class tokens, (tiles, tower_size), in the projector's input
            space although the model leaves them out; empty if the tower has none.
        project: the projector, (..., tower_size) -> (..., hidden_size).
    """

    received: torch.Tensor
    keys: torch.Tensor
    features: torch.Tensor
    classes: list[torch.Tensor]
    project: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Tokens:
    """The tokens that a method chooses among, and the states that it may use.

    Attributes:
        vision: bool (batch, tokens), True at vision tokens.
        padding: LongTensor (batch, 1), the number of leading pads; None if there are none.
        budgets: vision tokens to keep, one number per row.
        hidden: hidden states (batch, tokens, hidden_size) that enter the decoder layer before which tokens are dropped;
            None while the previous layer attends, which is when `score` is called if the method sees more than
            embeddings.
        attention: for `sees="attention"`, the queries and keys of the previous decoder layer.
        tower: for `sees="tower"` and `"video"`, the states of the vision tower.
        frames: for `sees="frames"` and `"video"`, [row][video]: the columns of the frames' tokens (frames, tokens).
        prepared: what `TokenMethod.prepare` returned, for the remaining tokens.
        counts: for each row, the number of vision tokens in the prompt and after each choice so far.
        num_layers: the model's decoder layers.
        row_seeds: one integer per row, a checksum of its tokens, for randomness that depends on the row, not the batch.
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
    row_seeds: tuple[int, ...] = ()

    @property
    def real(self) -> torch.Tensor:
        """bool (batch, tokens), False at pads."""
        if self.padding is None:
            return torch.ones_like(self.vision)
        return ~pad_columns(self.padding, self.vision.shape[1])[:, 0]

    def last_attention(self) -> torch.Tensor:
        """For `sees="attention"`: return the attention of the prompt's last token in the previous layer, averaged over
        its heads: (batch, tokens) in fp32."""
        seen = self.attention
        if seen is None:
            raise KVCompressError('last_attention() needs sees = "attention", the default')
        weights = window_attention(seen.queries, seen.keys, 1, seen.scaling, self.padding)
        return weights[..., 0, :].mean((1, 2))

    def videos(self, method: str) -> list[list[tuple[torch.Tensor, int]]]:
        """Return each row's videos: the columns of the frames' tokens (frames, tokens), and how many of them may stay.

        Images and newlines stay and count. Raises KVCompressError, in the name of `method`, if they exceed a budget."""
        rows = []
        for row, (of_row, budget) in enumerate(zip(self.frames, self.budgets, strict=True)):
            sizes, vision = [columns.numel() for columns in of_row], int(self.vision[row].sum())
            left = budget - (vision - sum(sizes))
            if left < 0:
                raise KVCompressError(
                    f"{method}: row {row} cannot keep {budget} of its {vision} vision tokens: images and the newlines "
                    f"of videos stay, {vision - sum(sizes)} tokens"
                )
            rows.append(list(zip(of_row, allocate(sizes, left, max(sizes)) if sizes else [], strict=True)))
        return rows

    def best(self, scores: torch.Tensor, budgets: list[int] | None = None) -> torch.Tensor:
        """Return the vision tokens with the highest scores (batch, tokens), as bool (batch, tokens).

        `budgets` are the tokens to keep per row, by default `self.budgets`. Among equal scores the later token wins. If
        the prompt's last token is a vision token, it always comes first, because the answer is predicted from it."""
        scores = scores.float().clamp(min=torch.finfo(torch.float32).min)
        scores[:, -1] = float("inf")
        scores = scores.masked_fill(~self.vision, float("-inf"))
        kept = top_indices(scores[:, None], self.budgets if budgets is None else budgets)[:, 0]
        chosen = F.pad(torch.zeros_like(self.vision), (0, 1))  # -1, no token, becomes a column that is cut off
        return chosen.scatter_(1, kept.remainder(chosen.shape[1]), True)[:, :-1]


class TokenMethod(Method, ABC):
    """Chooses vision tokens to drop, so that the following layers process and cache a shorter prompt.

    A method is a dataclass that derives from this class; its fields are its options. `ratio` is the fraction of each
    row's vision tokens that is kept; all other tokens stay. Kept tokens keep their positions.

    Attributes:
        sees: what the method chooses by: the prompt's `embeddings`, the `attention` of the previous decoder layer, the
            attention of the vision `tower`, the embeddings of a video's `frames`, or both of a `video`.
    """

    is_checkable: ClassVar[bool] = True
    sees: ClassVar[Sees] = "attention"

    @property
    def sets_budgets(self) -> bool:
        """Whether the method decides how many tokens stay; the budget is then an upper bound."""
        return False

    @property
    def watches_tower(self) -> bool:
        """Whether the method reads the vision tower."""
        return self.sees in ("tower", "video")

    @property
    def reads_prompt(self) -> bool:
        """Whether the choice depends on more of the prompt than the picture's or video's own tokens.

        A serving engine encodes pictures and videos one by one, apart from the prompt."""
        return False

    def layers(self, num_layers: int) -> list[int]:
        """Return the decoder layers before which tokens are dropped, ascending; 0, the default, means before the
        language model."""
        return [0]

    def budgets(self, kept: int, vision_tokens: int, num_layers: int) -> list[int]:
        """Return the vision tokens kept from each of `layers` on, if `kept` of `vision_tokens` are asked for."""
        return [kept for _ in self.layers(num_layers)]

    def hides_from(self, num_layers: int) -> int | None:
        """Return the first decoder layer whose decode steps see only some vision tokens; None if all see all."""
        return None

    def hide(self, attention: torch.Tensor, vision: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Return the stored entries that layers from `hides_from` on do not see: bool (batch, entries).

        Args:
            attention: the new token's attention in the previous layer, averaged over heads, (batch, entries) in fp32.
            vision: bool (batch, entries), True at vision tokens.
            before: `attention` of the previous step, None at a prompt's first step.
        """
        return torch.zeros_like(vision)

    def prepare(self, tokens: Tokens) -> torch.Tensor | None:
        """Return what to remember of each token's embedding, (batch, tokens, ...), or None."""
        return None

    def received(self, queries: torch.Tensor, keys: torch.Tensor, has_class: bool) -> torch.Tensor:
        """Return the attention that each patch of a tile receives, (patches,) in fp32, if the method `watches_tower`.

        `queries` and `keys` are those of the tower's layer `tower_layer`, (tokens, heads, head_dim)."""
        return received_attention(queries, keys, has_class)

    @abstractmethod
    def score(self, tokens: Tokens) -> torch.Tensor:
        """Score each token: (batch, tokens) in fp32. Scores of text and pads are ignored."""

    def choose(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the vision tokens that stay.

        Returns:
            bool (batch, tokens), True at the vision tokens that stay: `tokens.budgets[row]` in each row, or another
            number if the method `sets_budgets` or shares out its budget over layers as it goes; and the hidden states
            (batch, tokens, hidden_size), changed where tokens were merged into those that stay.

        Raises KVCompressError for scores of another shape, and for NaN at a vision token.
        """
        scores = checked_token_scores(scores, f"{type(self).__name__}.score", tokens.vision, tokens.hidden)
        return tokens.best(scores), tokens.hidden

    def checked_choice(self, scores: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `choose` returns, without tokens other than vision tokens. Raises KVCompressError for anything
        but a bool tensor (batch, tokens) and hidden states of the present shape."""
        found = self.choose(scores, tokens)
        returned = tuple(map(shape_of, found)) if isinstance(found, tuple) else shape_of(found)
        wanted = (tuple(tokens.vision.shape), tuple(tokens.hidden.shape))
        if returned != wanted or found[0].dtype != torch.bool:
            raise KVCompressError(
                f"{type(self).__name__}.choose returned {returned}: it must be a tensor of bool and the hidden states, "
                f"{wanted}"
            )
        return found[0] & tokens.vision, found[1]


def received_attention(queries: torch.Tensor, keys: torch.Tensor, has_class: bool) -> torch.Tensor:
    """Return the attention that each patch of a tile receives, averaged over the heads: (patches,) in fp32.

    It comes from the class token, which is first, or is the mean over all patches if the tower has none. `queries` and
    `keys` are (tokens, heads, head_dim). The result sums to at most 1."""
    asking = queries[:1] if has_class else queries
    logits = torch.einsum("qhd,khd->hqk", asking.float(), keys.float()) * queries.shape[-1] ** -0.5
    return logits.softmax(-1).mean((0, 1))[int(has_class) :]


def at_depth(layer: int, num_layers: int) -> int:
    """Return the decoder layer at the depth that `layer` has among 32, rounded half up; not the first."""
    return min(max(math.floor(layer * num_layers / 32 + 0.5), 1), num_layers - 1)


def checked_layer(method: str, layer: int, num_layers: int, option: str = "layer") -> int:
    """Return `layer`, the value of an `option` of `method`; KVCompressError if the model has no such layer."""
    if layer >= num_layers:
        raise KVCompressError(f"{method}: {option}={layer} is not below the model's {num_layers} layers")
    return layer
