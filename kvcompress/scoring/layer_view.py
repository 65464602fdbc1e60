"""`LayerView`, a method's view of one layer, and `Kept`, the entries that it keeps."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple, NoReturn, TypeVar

import torch

from ..device import on_device
from ..errors import KVCompressError
from ..kernels.column_sums import column_sums
from ..kernels.compact import compact
from .rotary import Rotary
from .windows import attention_blocks, pad_columns, protect_ends, protect_recent, window_attention, window_logits

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Settings:
    """The requested options, the same in every layer; see `kvcompress.policy.Engine`. None: the cluster's default.

    Attributes:
        cluster: the `KVCluster` that scores, for layer budgets that read options of the method.
        query_window: how many of the last queries it scores with, see `KVCluster.query_window`.
        moves_keys: whether keys are re-rotated to their position in the cache, as if there were no gaps between them.
        feeds_last_again: whether the last token of what is chosen from is fed again, at its own position.
        evicts_later: whether decoding evicts.
        groups: into how many groups `fair=` divides a prompt's tokens.
    """

    cluster: object = None
    query_window: int = 0
    head_budget: str | None = None
    safeguard: float = 0.2
    pyramid_beta: float = 20.0
    merge: str | None = None
    merge_modality: str = "any"
    moves_keys: bool = False
    feeds_last_again: bool = False
    evicts_later: bool = False
    groups: int = 1


@dataclass(frozen=True)
class StoredEntries:
    """The origin of stored entries.

    Attributes:
        columns: LongTensor (batch, kv_heads, entries), the sequence column of each entry.
        seen: columns of the sequence so far.
        tokens: real tokens of each row so far, evicted ones included.
        reading: whether a later chunk of a prompt was just read, so the latest queries are the prompt's.
    """

    columns: torch.Tensor
    seen: int
    tokens: tuple[int, ...]
    reading: bool = False


class SeveralLayers(BaseException):
    """A method asks for the one layer of a view of several; for `kvcompress` to catch, not for the method."""


class _Several:
    """Stands for `LayerView.place` and `module` in a view of several layers: any use raises SeveralLayers."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise SeveralLayers

    __class__ = property(_refuse)  # for isinstance
    __torch_function__ = classmethod(_refuse)  # as an index of a tensor
    __getattr__ = __getitem__ = __call__ = __iter__ = __len__ = __contains__ = __bool__ = __hash__ = _refuse
    __index__ = __int__ = __float__ = __round__ = __str__ = __repr__ = __format__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __invert__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _refuse
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse


SEVERAL = _Several()


class RowLayer(NamedTuple):
    """The layer of a view's row, if they belong to several: as `LayerView.place` and `module`."""

    place: int
    module: torch.nn.Module


@dataclass(frozen=True)
class LayerView:
    """A cluster's view of the layer that it compresses: a prompt or, while decoding, the stored entries.

    Attributes:
        place: index of the layer among the compressed layers.
        num_layers: number of compressed layers.
        lengths: real tokens of each row (while decoding: entries of the KV head that holds most).
        budgets: entries to keep per KV head, one number per row. With adaptive heads it is their mean, which may be a
            fraction.
        mean_budgets: the mean over the layers if `budgets` are the layer's own; otherwise empty.
        scaling: factor of q·k before the softmax.
        padding: LongTensor (batch, 1 or kv_heads), the number of leading columns that hold nothing; None if there are
            none.
        vision: bool (batch, columns), True at image and video tokens; None if they are unknown. In a later chunk of a
            prompt it is (batch, kv_heads, columns), as KV heads then hold different entries; `vision_by_head` covers
            both.
        vision_rank: in a later chunk, LongTensor (batch, kv_heads, columns): the number of the row's vision tokens
            before each column.
        frame_tokens: vision tokens per frame of each row's video, 0 if unknown; empty if no tokens are known.
        question_lengths: tokens of each row behind its last vision token, all of them if it has none; empty if
            unknown.
        protected: bool (batch, columns), True at columns that must stay, such as text when only vision tokens are
            evicted, or those of `protect=`. Among stored entries it is (batch, kv_heads, columns);
            `protected_by_head` covers both.
        protected_lengths: number of protected columns of each row; empty if nothing is protected.
        groups: LongTensor (batch, columns), the group of each column that `fair=` names; None without it, and among
            stored entries.
        row_seeds: one integer per row, a checksum of its context's tokens, for randomness that depends on the row, not
            the batch.
        module: the model's attention module, for scores that need its weights (`o_proj`).
        rotary: the rotation of the prompt's columns (while decoding: of the latest), for a cluster that asks for it.
        settings: the requested options.
        row_layers: if a GPU evicts from several layers at once, that of each row; `place` and `module` cannot be used
            then, and a cluster that does gets each layer alone. Empty otherwise.
        stored: the origin of the entries, while decoding or in a later chunk; None in a prompt, whose entries are its
            columns.
        sums: for a cluster whose scores add up over all queries, the running sum of `observe` for each column, (batch,
            kv_heads, columns); None if there is none.
        merge_threshold: `Kept.merge_threshold` of the previous eviction, None at the first.
        noted: while decoding, `Kept.noted` of the previous eviction, None at the first.
        earlier: in a later prompt, the entries stored before it, LongTensor (batch, kv_heads); otherwise None.
        received: for a cluster with a second pass, the attention that each column received in it, (batch, kv_heads,
            columns).
    """

    place: int
    num_layers: int
    lengths: list[int]
    budgets: list[int]
    scaling: float
    padding: torch.Tensor | None = None
    vision: torch.Tensor | None = None
    vision_rank: torch.Tensor | None = None
    frame_tokens: tuple[int, ...] = ()
    question_lengths: tuple[int, ...] = ()
    protected: torch.Tensor | None = None
    protected_lengths: tuple[int, ...] = ()
    groups: torch.Tensor | None = None
    row_seeds: tuple[int, ...] = ()
    module: torch.nn.Module | None = None
    rotary: Rotary | None = None
    settings: Settings = field(default_factory=Settings)
    row_layers: tuple[RowLayer, ...] = ()
    stored: StoredEntries | None = None
    sums: torch.Tensor | None = None
    merge_threshold: torch.Tensor | None = None
    noted: torch.Tensor | None = None
    earlier: torch.Tensor | None = None
    received: torch.Tensor | None = None
    mean_budgets: tuple[int, ...] = ()

    @property
    def is_decoding(self) -> bool:
        """Whether the choice is among stored entries: while decoding, and in a later chunk of a prompt.

        The queries are then the latest ones, and the keys those that earlier evictions left."""
        return self.stored is not None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Real tokens of each row so far, evicted ones included."""
        return tuple(self.lengths) if self.stored is None else self.stored.tokens

    def by_module(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.nn.Module | None]]:
        """Return the parts of a tensor (batch, ...) that belong to one attention module each, and the modules."""
        if not self.row_layers:
            return [(rows, self.module)]
        runs = [(module, len(list(run))) for module, run in groupby(self.row_layers, lambda layer: layer.module)]
        parts = rows.split([length for _, length in runs])
        return [(part, module) for part, (module, _) in zip(parts, runs, strict=True)]

    @property
    def vision_by_head(self) -> torch.Tensor | None:
        """`vision` as (batch, 1 or kv_heads, columns)."""
        return self.vision[:, None] if self.vision is not None and self.vision.ndim == 2 else self.vision

    @property
    def protected_by_head(self) -> torch.Tensor | None:
        """`protected` as (batch, 1 or kv_heads, columns)."""
        is_of_rows = self.protected is not None and self.protected.ndim == 2
        return self.protected[:, None] if is_of_rows else self.protected

    def rows(self, rows: torch.Tensor, first: int, columns: int) -> "LayerView":
        """Return the view of some rows (LongTensor), from the column `first` of `columns` on."""
        of_rows = rows.tolist()

        def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[rows][..., first:]

        def chosen(values: Sequence[_Value]) -> list[_Value]:
            return [values[row] for row in of_rows] if len(values) else []

        stored, rotary = self.stored, self.rotary
        if stored is not None:
            stored = replace(stored, columns=cut(stored.columns), tokens=tuple(chosen(stored.tokens)))
        if rotary is not None:
            rotary = rotary.rows(rows) if self.is_decoding else rotary.rows(rows).from_column(first)
        of_columns = ("vision", "vision_rank", "protected", "groups", "sums", "received")
        of_row = {name: getattr(self, name) for name in ("merge_threshold", "noted", "earlier")}
        tuples = ("frame_tokens", "question_lengths", "protected_lengths", "row_seeds", "mean_budgets", "row_layers")
        return replace(
            self,
            lengths=[min(length, columns - first) for length in chosen(self.lengths)],
            budgets=chosen(self.budgets),
            padding=None,
            rotary=rotary,
            stored=stored,
            **{name: cut(getattr(self, name)) for name in of_columns},
            **{name: None if each is None else each[rows] for name, each in of_row.items()},
            **{name: tuple(chosen(getattr(self, name))) for name in tuples},
        )

    # -- attention in this layer, for prompts with pads, later chunks and decoding

    def window_attention(self, queries: torch.Tensor | None, keys: torch.Tensor, window: int) -> torch.Tensor:
        """Return the causal attention weights of the last `window` queries over all keys.

        The result is (batch, kv_heads, groups, window, keys) in fp32. Rows of pad queries are zero."""
        return window_attention(self._given(queries), keys, window, self.scaling, self.padding, *self._columns())

    def window_logits(
        self, queries: torch.Tensor | None, keys: torch.Tensor, window: int, hides_window: bool = False
    ) -> torch.Tensor:
        """Return `window_attention` before its softmax, with -inf at keys that a query does not see.

        With `hides_window` none sees the last `window` keys."""
        given = self._given(queries), keys, window, self.scaling, self.padding
        return window_logits(*given, *self._columns(), hides_window)

    def column_sums(
        self, queries: torch.Tensor | None, keys: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention that each key receives from all available queries: (batch, kv_heads, keys) in fp32.

        Attention weights are summed over the queries and averaged over the query heads of a KV head. Memory is linear
        in the prompt. `weights` (batch, columns) weighs a prompt's queries; while decoding all count 1."""
        if not self.is_decoding:
            return column_sums(queries, keys, self.scaling, self.padding, weights)
        return self.window_attention(queries, keys, self._given(queries).shape[2]).sum(3).mean(2)

    def attention_blocks(
        self, queries: torch.Tensor, keys: torch.Tensor, first: int = 0
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield a prompt's attention weights block by block; see `scoring.windows.attention_blocks`."""
        return attention_blocks(queries, keys, self.scaling, self.padding, first)

    def real_queries(self, queries: torch.Tensor, window: int) -> torch.Tensor | None:
        """Return bool (batch, 1, 1, window, 1), False at the pads of a second prompt among the last `window` queries;
        None where there can be none."""
        if not self.is_decoding:
            return None
        return ~queries[:, None, :1, -window:, :1].isnan()

    def real_columns(self, keys: torch.Tensor) -> torch.Tensor:
        """Return bool (batch, 1 or kv_heads, columns), False at the pads of keys (batch, kv_heads, columns, ...)."""
        columns = keys.shape[2]
        if self.padding is None:
            return torch.ones(len(keys), 1, columns, dtype=torch.bool, device=keys.device)
        return ~pad_columns(self.padding, columns)

    def positions(self, keys: torch.Tensor) -> torch.Tensor:
        """Return each column's place among the tokens of its row (stored: of its row and head), LongTensor (1 or batch,
        1 or kv_heads, columns); negative at the pads of keys (batch, kv_heads, columns, ...)."""
        column = torch.arange(keys.shape[2], device=keys.device)[None, None]
        return column if self.padding is None else column - self.padding[..., None]

    def before_rotation(self, keys: torch.Tensor) -> torch.Tensor:
        """Return a prompt's keys (batch, kv_heads, columns, head_dim) before RoPE, in fp32.

        Stored entries are returned as they are. The cluster must set `unrotated_keys`."""
        if self.is_decoding:
            return keys.float()
        if self.rotary is None:
            name = type(self.settings.cluster).__name__
            raise KVCompressError(f"{name} scores keys before RoPE: tell cache.rotate(...) how the model rotates them")
        return self.rotary.unrotated(keys)

    def future_rotation(self, ahead: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Return the mean rotation over future text positions: (batch, head_dim, head_dim) in fp32.

        `ahead`, LongTensor (count,), is their distance from each row's last position. The cluster must set
        `future_rotation`."""
        if self.rotary is None:
            name = type(self.settings.cluster).__name__
            raise KVCompressError(f"{name} uses future positions: tell cache.rotate(...) how the model rotates them")
        return self.rotary.mean_rotation_at(ahead, head_dim, None if self.is_decoding else self.padding)

    def protect_recent(self, scores: torch.Tensor, recent: int | list[int]) -> torch.Tensor:
        """Return the scores (batch, kv_heads, keys) with +inf at the last `recent` (or `recent[row]`) columns."""
        return protect_recent(scores, [recent] * len(scores) if isinstance(recent, int) else recent)

    def protect_sinks(self, scores: torch.Tensor, sinks: int) -> torch.Tensor:
        """Return the scores (batch, kv_heads, keys) with +inf at each row's first `sinks` tokens and at its last."""
        return protect_ends(scores, sinks, self.padding)

    def _columns(self) -> tuple[torch.Tensor | None, int | None]:
        return (None, None) if self.stored is None else (self.stored.columns, self.stored.seen)

    def _given(self, queries: torch.Tensor | None) -> torch.Tensor:
        if queries is None:
            name = type(self.settings.cluster).__name__
            raise KVCompressError(f"{name}.query_window is 0, so no queries are remembered while decoding")
        return queries


@dataclass(frozen=True)
class Kept:
    """The entries that are kept.

    Attributes:
        keys, values: (batch, kv_heads, kept, head_dim).
        indices: LongTensor (batch, kv_heads, kept), ascending: the input column of each entry; -1 marks the unused
            leading slots of a row or head that keeps fewer.
        sums: (batch, kv_heads, kept), the `LayerView.sums` of each entry, if they are carried over.
        merge_threshold: (batch, kv_heads), the cosine from which evicted entries were merged, if merging has a
            threshold.
        noted: (batch, ...), what the cluster wants to know of this choice at the next eviction.
        totals, held: slots in use of each row over its heads, and of each head, `[row][head]`, if the host knows.
    """

    keys: torch.Tensor
    values: torch.Tensor
    indices: torch.Tensor
    sums: torch.Tensor | None = None
    merge_threshold: torch.Tensor | None = None
    noted: torch.Tensor | None = None
    totals: list[int] | None = None
    held: list[list[int]] | None = None

    @property
    def fills_all_slots(self) -> bool:
        """Whether the host knows that no slot is unused."""
        return self.totals == all_slots(self.indices)


def all_slots(indices: torch.Tensor) -> list[int]:
    """Return `Kept.totals` where no slot is unused."""
    return [indices[0].numel()] * len(indices)


def gather(keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, sums: torch.Tensor | None = None) -> Kept:
    """Gather the entries at `indices`, in the format of `Kept.indices`; unused slots hold arbitrary entries."""
    sums = None if sums is None else sums.gather(2, indices.clamp(min=0))
    return Kept(*compact(keys, values, indices), indices, sums)


def uniform_noise(view: LayerView, keys: torch.Tensor, seed: int | str) -> torch.Tensor:
    """Draw uniform numbers from [0, 1) for keys (batch, kv_heads, columns, ...): (batch, kv_heads, columns), zero at
    pads.

    The draw depends on the seed, the layer and the row's own tokens: it is the same in any batch and on any device, and
    differs at each eviction."""
    kv_heads, columns = keys.shape[1:3]
    noise = torch.zeros(len(view.lengths), kv_heads, columns, dtype=torch.float32)
    for row, (length, tokens) in enumerate(zip(view.lengths, view.tokens, strict=True)):
        place = view.row_layers[row].place if view.row_layers else view.place
        generator = generator_of(seed, place, view.row_seeds[row], tokens)
        noise[row, :, columns - length :] = torch.rand(kv_heads, length, dtype=torch.float32, generator=generator)
    return on_device(noise, keys.device)


def generator_of(*parts: int | str) -> torch.Generator:
    """Return a generator on the host whose draws depend on these parts alone, so on no device and no earlier draw."""
    return torch.Generator().manual_seed(zlib.crc32(" ".join(map(str, parts)).encode()))
