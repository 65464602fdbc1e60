"""What a method is: a `KVCluster` that scores keys. Everything else has a default."""

import warnings
from dataclasses import replace
from typing import ClassVar, Literal

import torch

from ..errors import KVCompressError
from ..methods import Method, make_method, method_info
from ..scoring.layer_view import Kept, LayerView, gather
from ..scoring.merging import merge_evicted
from ..scoring.places import moved_together
from ..scoring.rows import scores_of
from ..scoring.selection import ADAPTIVE, adaptive_indices, sinks_first, top_indices


class KVCluster(Method):
    """Decides which keys and values of one attention layer live on.

    A method is a dataclass that derives from this and gives `score`; its fields are the method's options. A cluster
    holds options only: what belongs to a generation is on its cache. The class attributes are the method's own
    choice; the user's option of the same name goes before it.
    """

    layer_budget: ClassVar[str] = "uniform"  # how layers share the budget: a rule of `kvcompress.layer_budgets`
    head_budget: ClassVar[str] = "uniform"  # how KV heads do: `uniform`, `shared`, or of `scoring.selection.ADAPTIVE`
    safeguard: ClassVar[float] = 0.2  # with adaptive heads, the part of its even share that each head is sure of
    merge: ClassVar[str] = "none"  # how evicted entries are merged into kept ones: a name of `scoring.merging.MERGES`
    decode_interval: ClassVar[int] = 16  # decode steps from one eviction to the next, where decoding evicts
    # What the method needs, or cannot do:
    whole_prompt: ClassVar[bool] = False  # chooses by the whole prompt, question included: not chunk by chunk
    # What is read before the choice: the `context` again (options `chunk_size`, `sinks`, `instruction`), or the full
    # cache's `answer` (option `answer_tokens`, method `foresee`).
    second_pass: ClassVar[Literal["", "context", "answer"]] = ""
    group_votes: ClassVar[Literal["max", "mean"]] = "max"  # in a second reading, over the query heads of a KV head
    reads_hidden: ClassVar[bool] = False  # what `foretell` makes of hidden states stands in the place of queries
    unrotated_queries: ClassVar[bool] = False  # `score` gets queries before RoPE; `view.rotary` rotates those to come
    unrotated_keys: ClassVar[bool] = False  # `score` asks `view.before_rotation(keys)`
    foresees_positions: ClassVar[bool] = False  # `score` asks `view.future_rotation(...)`
    sinks_on_top: ClassVar[bool] = False  # `ratio` counts what stands behind the option `sinks`, which is kept besides
    mixes_heads: ClassVar[bool] = False  # a KV head's choice depends on other heads' states: no tensor parallel

    @property
    def foresees(self) -> bool:
        """Whether `score` works with the rotation of positions to come, in each decode step anew."""
        return self.unrotated_queries or self.foresees_positions

    @property
    def watches_rotary(self) -> bool:
        """Whether the model's rotary embedding must be known."""
        return self.foresees or self.unrotated_keys

    @property
    def query_window(self) -> int:
        """How many of the last queries `score` gets while decoding; 0 for a method that looks at none, which then
        gets None. By default the option `window_size`, or 32."""
        return getattr(self, "window_size", 32)

    def score(
        self, queries: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, view: LayerView
    ) -> torch.Tensor:
        """How much each key is worth; the highest `view.budgets[row]` per row and KV head are kept.

        Args:
            queries: (batch, heads, queries, head_dim), rotated: all of a prompt; while decoding the last ones.
            keys: (batch, kv_heads, keys, head_dim), rotated; columns are tokens, the latest is the last.
            values: (batch, kv_heads, keys, head_dim).
            view: the layer's attention (`view.window_attention(queries, keys, n)`), budgets, padding, vision tokens.

        Returns:
            (batch, kv_heads, keys) in fp32, +inf for what must stay.

        A padded batch comes row by row, without pads, unless the score is marked by `scoring.rows.handles_padding`.
        """
        raise TypeError(f"{type(self).__name__} defines neither score nor update_kv")

    def foretell(self, hidden: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """For a method that `reads_hidden`: what is remembered of tokens, as if it were their queries, (batch, heads,
        tokens, size), from the hidden states (batch, tokens, hidden_size) that the attention of the model's layer
        `layer_idx` is given."""
        raise TypeError(f"{type(self).__name__} does not define foretell")

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor | None:
        """For scores that add up over all queries, prompt and answer: what these queries add to each column,
        (batch, kv_heads, keys). `summed` is the sum so far."""
        return None

    def summed(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        """What `observe` has added up for each column so far."""
        return self.observe(queries, keys, view) if view.sums is None else view.sums

    def note(self, kept: Kept, keys: torch.Tensor, view: LayerView) -> torch.Tensor | None:
        """What the next choice while decoding shall know of this one, (batch, ...): `LayerView.noted` then."""
        return None

    def carried(self, sums: torch.Tensor, view: LayerView) -> torch.Tensor:
        """What is carried on of `view.sums` once the layer has chosen; `view.budgets` are its own."""
        return sums

    def update_kv(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> Kept:
        """Compress one layer, before it is stored. A method that does more than score and select overrides this."""
        return self.keep(scores_of(self.score, queries, keys, values, view), keys, values, view)

    def keep(self, scores: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> Kept:
        """What lives on, given scores (batch, kv_heads, keys)."""
        sums = None if view.sums is None else self.carried(view.sums, view)
        kept = gather(keys, values, self.select(scores, view), sums)
        kept = replace(kept, noted=self.note(kept, keys, view))
        merge = view.settings.merge or self.merge
        if merge != "none":
            kept = merge_evicted(kept, keys, values, scores, view, merge)
        return moved_together(kept, view) if view.settings.moves_keys else kept

    def select(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        """The columns to keep, given scores (batch, kv_heads, keys); as in `Kept.indices`."""
        scores = self.final_scores(scores, view)
        head_budget = view.settings.head_budget or self.head_budget
        if head_budget in ADAPTIVE:
            return adaptive_indices(scores, view.budgets, view.settings.safeguard, view.padding, head_budget)
        return top_indices(scores, view.budgets, view.padding)

    def final_scores(self, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        """The scores to choose by: the mean of all heads where they keep the same tokens, +inf at what must stay.
        `view.budgets` are the layer's own here: the place to protect a part of the budget."""
        if (view.settings.head_budget or self.head_budget) == "shared":
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        if sinks := getattr(self, "sinks", 0):
            scores = sinks_first(scores, sinks, view.padding)
        if view.protected is not None:
            # What must stay goes before what the method itself protects, such as its window.
            scores = scores.clamp(max=torch.finfo(scores.dtype).max)
            scores = scores.masked_fill(view.protected[:, None], float("inf"))
        return scores

    prepared = final_scores  # its name up to version 0.1, which `super().prepared(...)` still finds

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "prepared" in vars(cls):
            warnings.warn(f"{cls.__name__}.prepared is now called final_scores", FutureWarning, stacklevel=2)
            cls.final_scores = cls.prepared
        elif "final_scores" in vars(cls):
            cls.prepared = cls.final_scores


def make_cluster(method: str | None, **options: object) -> KVCluster:
    """The cluster of a method with the given options, validated. Raises KVCompressError."""
    info = method_info(method)
    if not issubclass(info.cls, KVCluster):
        raise KVCompressError(f"method {info.name!r} drops tokens before they are cached: it is no cluster")
    return make_method(method, **options)
