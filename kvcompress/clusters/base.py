"""What a method is: a `KVCluster` that scores the prompt's keys, and the registry of methods."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import ClassVar, TypeVar

import torch

from ..errors import KVCompressError, unknown_name, validated
from ..selection import adaptive_indices, top_indices


@dataclass(frozen=True)
class Prompt:
    """What a cluster may know of what it compresses, in one layer: a prompt, or while decoding the stored entries.

    Attributes:
        layer_idx: index of the layer.
        num_layers: number of layers of the model.
        lengths: real tokens of each row (while decoding: its entries, of the KV head that has most).
        budgets: entries to keep per KV head, one number per row; with adaptive heads their mean.
        scaling: factor of q·k before the softmax.
        padding: LongTensor (batch, 1 or kv_heads) of leading columns that hold nothing, or None where there are none.
        vision: bool (batch, columns), True at image and video tokens, or None where they are unknown.
        protected: bool (batch, columns), True at what must stay, such as text where only vision tokens are evicted.
        protected_lengths: how many columns of each row that is; empty where nothing is protected.
        row_seeds: one integer per row, a checksum of its tokens: randomness that follows the row, not the batch.
        head_budget, safeguard: see `kvcompress.policy.Engine`.
        columns: while decoding, LongTensor (batch, kv_heads, entries): the column of the sequence that each entry
            comes from; None in a prompt, where it is its place.
        seen: while decoding, the columns of the sequence so far.
        tokens: while decoding, the real tokens of each row so far, evicted ones included.
    """

    layer_idx: int
    num_layers: int
    lengths: list[int]
    budgets: list[int]
    scaling: float
    padding: torch.Tensor | None = None
    vision: torch.Tensor | None = None
    protected: torch.Tensor | None = None
    protected_lengths: tuple[int, ...] = ()
    row_seeds: tuple[int, ...] = ()
    head_budget: str = "uniform"
    safeguard: float = 0.2
    columns: torch.Tensor | None = None
    seen: int | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kept:
    """What lives on: keys and values (batch, kv_heads, kept, head_dim), and the columns of the input that they come
    from, LongTensor (batch, kv_heads, kept), ascending; -1 marks the unused leading slots of a row or head that
    keeps fewer."""

    keys: torch.Tensor
    values: torch.Tensor
    indices: torch.Tensor


class KVCluster:
    """Decides which keys and values of one attention layer live on.

    A method is a dataclass that derives from this and gives `score`; its fields are the method's options. One that
    does more than select (merge, for example) overrides `update_kv`. A cluster holds options only: what belongs to
    a generation is on its cache.

    Attributes:
        paper: where the method comes from.
        head_budget: `adaptive` where the method splits a row's budget over its KV heads by their scores.
        decode_interval: decode steps from one eviction to the next, where the user asks for eviction and says no more.
    """

    paper: ClassVar[str] = ""
    head_budget: ClassVar[str] = "uniform"
    decode_interval: ClassVar[int] = 16

    @property
    def query_window(self) -> int:
        """How many of the last queries `score` looks at while decoding; 0: none."""
        return 0

    def layer_budgets(self, prompt: Prompt) -> list[int]:
        """Entries to keep per KV head in this layer, one number per row; `prompt.budgets` is the mean over layers."""
        return prompt.budgets

    def score(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        """How much each key is worth; the highest `prompt.budgets[row]` per row and KV head are kept.

        Args:
            queries: (batch, heads, queries, head_dim), rotated.
            keys, values: (batch, kv_heads, keys, head_dim), rotated; `keys` columns are the prompt's tokens.
            prompt: lengths, budgets, padding and the like.

        Returns:
            (batch, kv_heads, keys) in fp32, +inf for what must stay. What stands at pad columns does not matter.
        """
        raise TypeError(f"{type(self).__name__} defines neither score nor update_kv")

    def update_kv(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt) -> Kept:
        """Compress one layer's prompt before it is stored. Arguments as in `score`."""
        return gather(keys, values, self.select(self.score(queries, keys, values, prompt), prompt))

    def select(self, scores: torch.Tensor, prompt: Prompt) -> torch.Tensor:
        """The columns to keep, given scores (batch, kv_heads, keys); as in `Kept.indices`."""
        if prompt.protected is not None:
            # What must stay goes before what the method itself protects, such as its window.
            scores = scores.clamp(max=torch.finfo(scores.dtype).max)
            scores = scores.masked_fill(prompt.protected[:, None], float("inf"))
        if prompt.head_budget == "adaptive":
            return adaptive_indices(scores, prompt.budgets, prompt.safeguard, prompt.padding)
        return top_indices(scores, prompt.budgets, prompt.padding)


def gather(keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> Kept:
    """The entries at `indices`, as in `Kept.indices`; what stands in unused slots does not matter."""
    rows = indices.clamp(min=0).unsqueeze(-1)
    return Kept(
        keys.gather(2, rows.expand(-1, -1, -1, keys.shape[3])),
        values.gather(2, rows.expand(-1, -1, -1, values.shape[3])),
        indices,
    )


@dataclass(frozen=True)
class MethodInfo:
    """An entry of `list_methods()`: the class, its paper, and its options with their defaults."""

    name: str
    cls: type[KVCluster]
    paper: str
    options: dict[str, object]


_METHODS: dict[str, MethodInfo] = {}
ClusterClass = TypeVar("ClusterClass", bound=type[KVCluster])


def method_name(name: str) -> str:
    """The registered spelling: lower case, `-` where the user wrote `_`."""
    return str(name).lower().replace("_", "-")


def register_method(name: str) -> Callable[[ClusterClass], ClusterClass]:
    """Class decorator: makes a cluster dataclass usable as `method=name` everywhere. The name must be free."""

    def register(cls: ClusterClass) -> ClusterClass:
        key = method_name(name)
        if not (is_dataclass(cls) and issubclass(cls, KVCluster)):
            raise KVCompressError(f"{cls.__name__} is not a dataclass that derives from KVCluster")
        known = _METHODS.get(key)
        # A notebook cell that is run again may redefine its own class.
        if known and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise KVCompressError(f"method {key!r} is already registered by {known.cls.__qualname__}")
        options = {}
        for field in fields(cls):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if default is MISSING:
                raise KVCompressError(f"option {field.name!r} of method {key!r} has no default")
            options[field.name] = default
        _METHODS[key] = MethodInfo(key, cls, cls.paper, options)
        return cls

    return register


def list_methods() -> dict[str, MethodInfo]:
    """All registered methods: name -> class, paper, options with defaults."""
    return dict(sorted(_METHODS.items()))


def method_info(name: str | None) -> MethodInfo:
    """The entry of a method name; None is `full`. Raises KVCompressError with the valid names."""
    key = method_name("full" if name is None else name)
    if key not in _METHODS:
        raise unknown_name("there is no method", name, _METHODS)
    return _METHODS[key]


def make_cluster(method: str | None, **options: object) -> KVCluster:
    """The cluster of a method with the given options, validated. Raises KVCompressError."""
    info = method_info(method)
    for option in options:
        if option not in info.options:
            raise unknown_name(f"method {info.name!r} has no option", option, info.options)
    return validated(info.cls, f"method {info.name!r}: option", {**info.options, **options})
