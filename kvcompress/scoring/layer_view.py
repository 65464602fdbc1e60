"""What a method is given of a layer, `LayerView`, and what it gives back, `Kept`."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from ..errors import KVCompressError
from ..kernels.column_sums import column_sums
from ..kernels.compact import compact
from .rotary import Rotary
from .windows import attention_blocks, pad_columns, protect_ends, protect_recent, window_attention, window_logits

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Settings:
    """What was asked for, the same in every layer; see `kvcompress.policy.Engine`. None: the cluster's own choice.

    Attributes:
        cluster: the `KVCluster` that scores, for a layer budget that takes options of its method.
        query_window: how many of the last queries it scores with, see `KVCluster.query_window`.
        moves_keys: whether keys are rotated anew to their place in the cache, as if nothing had stood between them.
        evicts_later: whether decoding evicts.
    """

    cluster: object = None
    query_window: int = 0
    head_budget: str | None = None
    safeguard: float = 0.2
    pyramid_beta: float = 20.0
    merge: str | None = None
    merge_modality: str = "any"
    moves_keys: bool = False
    evicts_later: bool = False


@dataclass(frozen=True)
class StoredEntries:
    """Where stored entries come from.

    Attributes:
        columns: LongTensor (batch, kv_heads, entries), the column of the sequence of each.
        seen: columns of the sequence so far.
        tokens: real tokens of each row so far, evicted ones included.
        reading: whether a later chunk of a prompt was just read, so that the latest queries are the prompt's.
    """

    columns: torch.Tensor
    seen: int
    tokens: tuple[int, ...]
    reading: bool = False


@dataclass(frozen=True)
class LayerView:
    """What a cluster may know of the layer that it compresses: a prompt, or while decoding the stored entries.

    Attributes:
        place: of the layer among those that are compressed.
        num_layers: how many layers are compressed.
        lengths: real tokens of each row (while decoding: its entries, of the KV head that has most).
        budgets: entries to keep per KV head, one number per row; with adaptive heads their mean, a
            fraction where the heads' total is no multiple of their number.
        mean_budgets: their mean over the layers, where `budgets` are the layer's own; else empty.
        scaling: factor of q·k before the softmax.
        padding: LongTensor (batch, 1 or kv_heads) of leading columns that hold nothing, or None where there are none.
        vision: bool (batch, columns), True at image and video tokens, or None where they are unknown. In a later chunk
            of a prompt (batch, kv_heads, columns), as KV heads then hold different entries; `vision_by_head` is both.
        vision_rank: in a later chunk, LongTensor (batch, kv_heads, columns): the vision tokens of the row before each.
        frame_tokens: vision tokens per frame of each row's video, 0 where unknown; empty where no tokens are known.
        protected: bool (batch, columns), True at what must stay, such as text where only vision tokens are evicted.
        protected_lengths: how many columns of each row that is; empty where nothing is protected.
        row_seeds: one integer per row, a checksum of its tokens: randomness that follows the row, not the batch.
        module: the model's attention module, for what a score needs of its weights (`o_proj`).
        rotary: how the prompt's columns are rotated (while decoding: the latest), for a cluster that asks for it.
        settings: what was asked for.
        stored: where the entries come from, while decoding or in a later chunk; None in a prompt: from their columns.
        sums: for a cluster whose scores add up over all queries: what `observe` has added up for each column so far,
            (batch, kv_heads, columns); None where nothing is carried on.
        merge_threshold: `Kept.merge_threshold` of the eviction before this one, None at the first.
        noted: while decoding, `Kept.noted` of the eviction before this one, None at the first.
        received: for a cluster with a second pass: what each column received in it, (batch, kv_heads, columns).
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
    protected: torch.Tensor | None = None
    protected_lengths: tuple[int, ...] = ()
    row_seeds: tuple[int, ...] = ()
    module: torch.nn.Module | None = None
    rotary: Rotary | None = None
    settings: Settings = field(default_factory=Settings)
    stored: StoredEntries | None = None
    sums: torch.Tensor | None = None
    merge_threshold: torch.Tensor | None = None
    noted: torch.Tensor | None = None
    received: torch.Tensor | None = None
    mean_budgets: tuple[int, ...] = ()

    @property
    def is_decoding(self) -> bool:
        """Whether stored entries are chosen among: while decoding, and in a later chunk of a prompt. The queries are
        then the latest ones, and the keys those that earlier choices have left."""
        return self.stored is not None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Real tokens of each row so far, evicted ones included."""
        return tuple(self.lengths) if self.stored is None else self.stored.tokens

    @property
    def vision_by_head(self) -> torch.Tensor | None:
        """`vision` as (batch, 1 or kv_heads, columns)."""
        return self.vision[:, None] if self.vision is not None and self.vision.ndim == 2 else self.vision

    def rows(self, rows: torch.Tensor, first: int, columns: int) -> "LayerView":
        """Of some rows (LongTensor) of a layer with so many `columns`, from the column `first` on: without the pads
        before it."""
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
        of_columns = ("vision", "vision_rank", "protected", "sums", "received")
        of_row = {name: getattr(self, name) for name in ("merge_threshold", "noted")}
        tuples = ("frame_tokens", "protected_lengths", "row_seeds", "mean_budgets")
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

    # -- attention in this layer, right for pads, later chunks and decoding

    def window_attention(self, queries: torch.Tensor | None, keys: torch.Tensor, window: int) -> torch.Tensor:
        """Causal attention weights of the last `window` queries, or as many as there are, over all keys: (batch,
        kv_heads, groups, window, keys) in fp32. Rows of pad queries are zero."""
        return window_attention(self._given(queries), keys, window, self.scaling, self.padding, *self._columns())

    def window_logits(self, queries: torch.Tensor | None, keys: torch.Tensor, window: int) -> torch.Tensor:
        """`window_attention` before its softmax; -inf at what a query does not see."""
        return window_logits(self._given(queries), keys, window, self.scaling, self.padding, *self._columns())

    def column_sums(
        self, queries: torch.Tensor | None, keys: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What each key receives from all queries at hand: their attention weights summed, averaged over the query
        heads of a KV head, (batch, kv_heads, keys) in fp32. Memory is linear in the prompt.

        `weights` (batch, columns): of a prompt's queries, what each counts; while decoding all count one."""
        if not self.is_decoding:
            return column_sums(queries, keys, self.scaling, self.padding, weights)
        return self.window_attention(queries, keys, self._given(queries).shape[2]).sum(3).mean(2)

    def attention_blocks(
        self, queries: torch.Tensor, keys: torch.Tensor, first: int = 0
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """A prompt's attention weights, a block of queries at a time: `scoring.windows.attention_blocks`."""
        return attention_blocks(queries, keys, self.scaling, self.padding, first)

    def real_columns(self, keys: torch.Tensor) -> torch.Tensor:
        """False at the pad columns of keys (batch, kv_heads, columns, ...): bool (batch, 1 or kv_heads, columns)."""
        columns = keys.shape[2]
        if self.padding is None:
            return torch.ones(len(keys), 1, columns, dtype=torch.bool, device=keys.device)
        return ~pad_columns(self.padding, columns)

    def before_rotation(self, keys: torch.Tensor) -> torch.Tensor:
        """A prompt's keys (batch, kv_heads, columns, head_dim) as they were before RoPE, in fp32; stored entries as
        they are. For a cluster that says `unrotated_keys`."""
        if self.is_decoding:
            return keys.float()
        if self.rotary is None:
            name = type(self.settings.cluster).__name__
            raise KVCompressError(f"{name} scores keys before RoPE: give cache.rotate(...) how the model rotates them")
        return self.rotary.unrotated(keys)

    def future_rotation(self, ahead: torch.Tensor, head_dim: int) -> torch.Tensor:
        """The mean rotation of the text positions that are so many, LongTensor (count,), ahead of each row's last:
        (batch, head_dim, head_dim) in fp32. For a cluster that says `foresees_positions`."""
        if self.rotary is None:
            name = type(self.settings.cluster).__name__
            raise KVCompressError(f"{name} foresees positions: give cache.rotate(...) how the model rotates them")
        return self.rotary.mean_rotation_at(ahead, head_dim, None if self.is_decoding else self.padding)

    def protect_recent(self, scores: torch.Tensor, recent: int | list[int]) -> torch.Tensor:
        """The scores (batch, kv_heads, keys) with +inf at the last `recent` columns, of all rows or `recent[row]`."""
        return protect_recent(scores, [recent] * len(scores) if isinstance(recent, int) else recent)

    def protect_sinks(self, scores: torch.Tensor, sinks: int) -> torch.Tensor:
        """The scores (batch, kv_heads, keys) with +inf at each row's first `sinks` tokens and at its last."""
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
    """What lives on: keys and values (batch, kv_heads, kept, head_dim), and the columns of the input that they come
    from, LongTensor (batch, kv_heads, kept), ascending; -1 marks the unused leading slots of a row or head that
    keeps fewer. `sums` (batch, kv_heads, kept): `LayerView.sums` of each, where they are carried on. `merge_threshold`
    (batch, kv_heads): from which cosine on evicted entries were merged, where merging has such a threshold. `noted`
    (batch, ...): what the cluster wants to know of this choice at the next one. `total`: the slots in use of all rows
    and heads, and `held` those of each, [row][head], where the host knows."""

    keys: torch.Tensor
    values: torch.Tensor
    indices: torch.Tensor
    sums: torch.Tensor | None = None
    merge_threshold: torch.Tensor | None = None
    noted: torch.Tensor | None = None
    total: int | None = None
    held: list[list[int]] | None = None

    @property
    def fills_all_slots(self) -> bool:
        """The host knows that no slot is unused."""
        return self.total == self.indices.numel()


def gather(keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, sums: torch.Tensor | None = None) -> Kept:
    """The entries at `indices`, as in `Kept.indices`; what stands in unused slots does not matter."""
    sums = None if sums is None else sums.gather(2, indices.clamp(min=0))
    return Kept(*compact(keys, values, indices), indices, sums)


def uniform_noise(view: LayerView, kv_heads: int, columns: int, seed: int | str) -> torch.Tensor:
    """Numbers drawn evenly from [0, 1), (batch, kv_heads, columns), zero at pads. The draw follows the seed, the layer
    and the row's own tokens: it is the same alone, in any batch and on any device, and another one at each eviction."""
    noise = torch.zeros(len(view.lengths), kv_heads, columns)
    for row, (length, tokens) in enumerate(zip(view.lengths, view.tokens, strict=True)):
        key = f"{seed} {view.place} {view.row_seeds[row]} {tokens}"
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        noise[row, :, columns - length :] = torch.rand(kv_heads, length, generator=generator)
    return noise
