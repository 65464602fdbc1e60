"""`KVCluster`, the base class of KV methods. A method scores keys; everything else has a default."""

from dataclasses import replace
from typing import ClassVar, Literal

import torch

from ..device import on_device
from ..errors import KVCompressError
from ..methods import Method, make_method, method_info
from ..scoring.layer_view import Kept, LayerView, gather
from ..scoring.merging import merge_evicted
from ..scoring.places import moved_together
from ..scoring.returned import check_columns, check_final, checked_rows, checked_scores
from ..scoring.rows import scores_of
from ..scoring.selection import ADAPTIVE, adaptive_indices, fair_scores, sinks_first, top_indices


class KVCluster(Method):
    """Decides which keys and values of one attention layer are kept.

    A method is a dataclass that derives from this class and defines `score`; its fields are the method's options. A
    cluster holds only options: the state of a generation lives in its cache. The class attributes are the method's
    defaults; a user's option of the same name overrides them.
    """

    is_checkable: ClassVar[bool] = True
    layer_budget: ClassVar[str] = "uniform"  # how layers share the budget: a name in `kvcompress.layer_budgets`
    head_budget: ClassVar[str] = "uniform"  # how KV heads do: uniform, shared, or one of `selection.ADAPTIVE`
    safeguard: ClassVar[float] = 0.2  # with adaptive heads, the part of its even share that each head is guaranteed
    merge: ClassVar[str] = "none"  # how evicted entries are merged into kept ones: a name in `scoring.merging.MERGES`
    decode_interval: ClassVar[int] = 16  # decode steps between evictions, if decoding evicts
    # What the method needs, and what it cannot do:
    whole_prompt: ClassVar[bool] = False  # needs the whole prompt, question included: cannot work chunk by chunk
    # What the model reads before entries are chosen: the `context` again (options `chunk_size`, `sinks`,
    # `instruction`), or the full cache's `answer` (option `answer_tokens`, method `score_by_answer`).
    second_pass: ClassVar[Literal["", "context", "answer"]] = ""
    group_votes: ClassVar[Literal["max", "mean"]] = "max"  # in a second pass, over the query heads of a KV head
    reads_hidden: ClassVar[bool] = False  # `score` gets the `hidden_features` of hidden states as its queries
    unrotated_queries: ClassVar[bool] = False  # `score` gets queries before RoPE; `view.rotary` rotates future ones
    unrotated_keys: ClassVar[bool] = False  # `score` calls `view.before_rotation(keys)`
    future_rotation: ClassVar[bool] = False  # `score` calls `view.future_rotation(...)`
    sinks_on_top: ClassVar[bool] = False  # `ratio` leaves out the first `sinks` tokens, which are kept in addition
    biases_keys: ClassVar[bool] = False  # keys have one more channel, the last: a bias that is added to their logits
    fills_budget: ClassVar[bool] = False  # a choice of its own keeps as many entries per row and head as `select` does
    mixes_heads: ClassVar[bool] = False  # a KV head's scores depend on other heads' states: no tensor parallelism

    @property
    def uses_future_positions(self) -> bool:
        """Whether `score` uses the rotation of future positions, which changes with every decode step."""
        return self.unrotated_queries or self.future_rotation

    @property
    def watches_rotary(self) -> bool:
        """Whether the method needs the model's rotary embedding."""
        return self.uses_future_positions or self.unrotated_keys

    @property
    def query_window(self) -> int:
        """How many of the last queries `score` gets while decoding.

        By default the option `window_size`, or 32. A method that uses no queries sets 0 and gets None."""
        return getattr(self, "window_size", 32)

    def as_stored(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the model's keys with a channel for their bias, which is 0, if the method gives keys one."""
        return torch.nn.functional.pad(keys, (0, 1)) if self.biases_keys else keys

    def score(
        self, queries: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        """Score each key. The highest `view.budgets[row]` per row and KV head are kept.

        Args:
            queries: (batch, heads, queries, head_dim), rotated: all queries of a prompt; while decoding, the last ones.
            keys: (batch, kv_heads, keys, head_dim), rotated; columns are tokens, the latest is the last.
            values: (batch, kv_heads, keys, head_dim).
            view: the layer's attention (`view.window_attention(queries, keys, n)`), budgets, padding, vision tokens.

        Returns:
            (batch, kv_heads, keys) in fp32, +inf for entries that must stay.

        A padded batch is passed row by row, without pads, unless the method is marked by
        `scoring.rows.handles_padding`.
        """
        raise TypeError(f"{type(self).__name__} defines neither score nor update_kv")

    def hidden_features(self, hidden: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Compute what `score` gets in place of queries, for a method that `reads_hidden`.

        Args:
            hidden: (batch, tokens, hidden_size), the input of the attention in the model's layer `layer_idx`.

        Returns:
            (batch, heads, tokens, size).
        """
        raise TypeError(f"{type(self).__name__} does not define hidden_features")

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor | None:
        """Return what these queries add to the running sum of each column: (batch, kv_heads, keys).

        For scores that are summed over all queries, of prompt and answer; `summed` is the sum so far."""
        return None

    def summed(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Return the running sum of `observe` for each column."""
        return self.observe(queries, keys, view) if view.sums is None else view.sums

    def note(self, kept: Kept, keys: torch.Tensor, view: LayerView) -> torch.Tensor | None:
        """Return what the next eviction while decoding gets as `LayerView.noted`, (batch, ...).

        While decoding, a row that keeps everything next to one that does not keeps what it noted, if the shapes agree,
        as it would alone."""
        return None

    def checked_note(self, kept: Kept, keys: torch.Tensor, view: LayerView) -> torch.Tensor | None:
        """Return `note`. Raises KVCompressError if it is neither None nor a tensor (batch, ...)."""
        noted = self.note(kept, keys, view)
        return None if noted is None else checked_rows(noted, f"{type(self).__name__}.note", len(keys))

    def carried(self, sums: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Return the sums to carry over from `view.sums` after the choice; `view.budgets` are the layer's own."""
        return sums

    def update_kv(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> Kept:
        """Compress one layer before it is stored. Override this in a method that does more than score and select."""
        return self.keep(scores_of(self.score, queries, keys, values, view), keys, values, view)

    def keep(self, scores: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> Kept:
        """Select, gather and merge entries by their scores (batch, kv_heads, keys)."""
        sums = None if view.sums is None else self.carried(view.sums, view)
        chosen = self.select(scores, view)
        if type(self).select is not KVCluster.select:
            check_columns(chosen, f"{type(self).__name__}.select", keys, view)
        kept = gather(keys, values, chosen, sums)
        kept = replace(kept, noted=self._noted(kept, keys, view))
        merge = view.settings.merge or self.merge
        if merge != "none":
            kept = merge_evicted(kept, keys, values, scores, view, merge)
        return moved_together(kept, view) if view.settings.moves_keys else kept

    def _noted(self, kept: Kept, keys: torch.Tensor, view: LayerView) -> torch.Tensor | None:
        """Return `note` of the rows that evict, and what the others noted before."""
        noted, before = self.checked_note(kept, keys, view), view.noted
        if noted is None or before is None or noted.shape != before.shape:
            return noted
        evicts = [budget < entries for budget, entries in zip(view.budgets, view.lengths, strict=True)]
        if all(evicts):
            return noted
        return torch.where(on_device(evicts, noted.device).view(-1, *[1] * (noted.ndim - 1)), noted, before)

    def select(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Return the columns to keep, in the format of `Kept.indices`, given scores (batch, kv_heads, keys)."""
        found = self.final_scores(scores, view)
        if type(self).final_scores is not KVCluster.final_scores:
            place = f"{type(self).__name__}.final_scores"
            found = checked_scores(found, place, scores)
            check_final(found, place, scores, view)
            found = _with_protected(found, view)
        head_budget = view.settings.head_budget or self.head_budget
        if head_budget in ADAPTIVE:
            return adaptive_indices(found, view.budgets, view.settings.safeguard, view.padding, head_budget)
        if view.groups is not None:
            found = fair_scores(found, view.groups, view.settings.groups, view.budgets, view.padding)
        return top_indices(found, view.budgets, view.padding)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Return the scores to select by: averaged over heads that keep the same tokens, +inf where entries must stay.

        `view.budgets` are the layer's own here, so this is the place to protect a part of the budget. What overrides
        this passes its scores to `super().final_scores`, without which heads would keep different tokens."""
        if (view.settings.head_budget or self.head_budget) == "shared":
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        if sinks := getattr(self, "sinks", 0):
            scores = sinks_first(scores, sinks, view.padding)
        return _with_protected(scores, view)


def _with_protected(scores: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Return the scores with +inf at `view.protected`, which come before what the method protects, such as a window."""
    if view.protected is None:
        return scores
    scores = scores.clamp(max=torch.finfo(scores.dtype).max)
    return scores.masked_fill(view.protected_by_head, float("inf"))


def make_cluster(method: str | None, **options: object) -> KVCluster:
    """Create the cluster of a method and validate its options. Raises KVCompressError."""
    info = method_info(method)
    if not issubclass(info.cls, KVCluster):
        raise KVCompressError(f"method {info.name!r} drops tokens before they are cached, so it has no cluster")
    return make_method(method, **options)
