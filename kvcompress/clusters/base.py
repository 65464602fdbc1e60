"""What a method is: a `KVCluster` that scores the prompt's keys, and the registry of methods."""

from typing import ClassVar

import torch

from ..errors import KVCompressError
from ..methods import Method, make_method, method_info
from ..scoring.layer_view import Kept, Prompt, gather
from ..scoring.merging import merge_evicted
from ..scoring.selection import adaptive_indices, top_indices


class KVCluster(Method):
    """Decides which keys and values of one attention layer live on.

    A method is a dataclass that derives from this and gives `score`; its fields are the method's options. One that
    does more than select (merge, for example) overrides `update_kv`. A cluster holds options only: what belongs to
    a generation is on its cache.

    Its parts can be exchanged one by one: the scores (`scorer=` another method), how a budget is shared out over the
    layers (`layer_budget=`) and over the KV heads of a layer (`head_budget=`), what becomes of evicted entries
    (`merge=`), and how often decoding evicts (`decode_interval=`). The attributes are the method's own choice.

    Attributes:
        layer_budget: name of the rule in `kvcompress.layer_budgets`.
        head_budget: `uniform`, `shared` or `adaptive`, see `kvcompress.policy.Engine`.
        merge: `none`, or how evicted entries are merged into kept ones, see merging.py.
        safeguard: with adaptive heads, the part of its even share that each head is sure of.
        decode_interval: decode steps from one eviction to the next, where the user asks for eviction and says no more.
        second_pass: whether the prompt is read again before the choice, see second_pass.py; such a cluster has the
            options `chunk_size` and `instruction`.
        whole_prompt: whether the choice needs the whole prompt at once, question included, so that it cannot be made
            chunk by chunk (`prefill_chunk=`).
        mixes_heads: whether what is kept in one KV head depends on which others are there, beyond `head_budget` and
            `layer_budget`; such a method does not run on a part of the heads (tensor parallel).
        unrotated_queries: whether `score` wants the queries as they were before the rotary position embedding; it
            finds in `prompt.rotary` how queries to come will be rotated.
    """

    layer_budget: ClassVar[str] = "uniform"
    head_budget: ClassVar[str] = "uniform"
    merge: ClassVar[str] = "none"
    safeguard: ClassVar[float] = 0.2
    decode_interval: ClassVar[int] = 16
    second_pass: ClassVar[bool] = False
    whole_prompt: ClassVar[bool] = False
    mixes_heads: ClassVar[bool] = False
    unrotated_queries: ClassVar[bool] = False

    @property
    def query_window(self) -> int:
        """How many of the last queries `score` looks at while decoding; 0: none."""
        return 0

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        """How much each key is worth; the highest `prompt.budgets[row]` per row and KV head are kept.

        Args:
            queries: (batch, heads, queries, head_dim), rotated, unless `unrotated_queries`.
            keys, values: (batch, kv_heads, keys, head_dim), rotated; `keys` columns are the prompt's tokens.
            prompt: lengths, budgets, padding and the like.

        Returns:
            (batch, kv_heads, keys) in fp32, +inf for what must stay. What stands at pad columns does not matter.
        """
        raise TypeError(f"{type(self).__name__} defines neither score nor update_kv")

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, prompt: Prompt) -> torch.Tensor | None:
        """For a method whose scores add up over all queries, prompt and answer: what these queries add to each column,
        (batch, kv_heads, keys). While decoding that evicts, `score` finds the sum so far in `prompt.accumulated`."""
        return None

    def update_kv(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> Kept:
        """Compress one layer's prompt before it is stored. Arguments as in `score`."""
        return self.keep(self.score(queries, keys, values, prompt), keys, values, prompt)

    def keep(self, scores: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> Kept:
        """What lives on, given scores (batch, kv_heads, keys)."""
        kept = gather(keys, values, self.select(scores, prompt), prompt.accumulated)
        merge = prompt.merge or self.merge
        return kept if merge == "none" else merge_evicted(kept, keys, values, scores, prompt, merge)

    def select(self, scores: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        """The columns to keep, given scores (batch, kv_heads, keys); as in `Kept.indices`."""
        scores = self.prepared(scores, prompt)
        if (prompt.head_budget or self.head_budget) == "adaptive":
            return adaptive_indices(scores, prompt.budgets, prompt.safeguard, prompt.padding)
        return top_indices(scores, prompt.budgets, prompt.padding)

    def prepared(self, scores: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        """The scores to choose by: the mean of all heads where they keep the same tokens, +inf at what must stay."""
        if (prompt.head_budget or self.head_budget) == "shared":
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        if prompt.protected is not None:
            # What must stay goes before what the method itself protects, such as its window.
            scores = scores.clamp(max=torch.finfo(scores.dtype).max)
            scores = scores.masked_fill(prompt.protected[:, None], float("inf"))
        return scores


def make_cluster(method: str | None, **options: object) -> KVCluster:
    """The cluster of a method with the given options, validated. Raises KVCompressError."""
    info = method_info(method)
    if not issubclass(info.cls, KVCluster):
        raise KVCompressError(f"method {info.name!r} drops tokens before they are cached: it is no cluster")
    return make_method(method, **options)
