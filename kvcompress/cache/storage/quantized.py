"""Entries in few bits, quantized in groups."""

from dataclasses import dataclass, replace

import torch

from ...kernels.grouped import grouped_decode, has_kernels
from ...kernels.pieces import Pieces, pieces
from ...kernels.quantization import Quantized, Quantizer
from ...scoring.layer_view import Kept, all_slots
from .base import Storage, columns_of, rows_of
from .dense import DenseStorage


@dataclass(frozen=True)
class _Block:
    """Quantized entries of all rows: `rows` has a pair per row, keys as (head_dim, entries of all heads) and values as
    (entries of all heads, head_dim). `unused`: bool (batch, kv_heads, slots), or None where all slots are in use."""

    rows: list[tuple[Quantized, Quantized]]
    unused: torch.Tensor | None
    heads: int
    slots: int

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (batch, kv_heads, slots, head_dim), zero at unused slots."""
        keys = [self._filled(row, keys.dequantize().T) for row, (keys, _) in enumerate(self.rows)]
        values = [self._filled(row, values.dequantize()) for row, (_, values) in enumerate(self.rows)]
        return torch.stack(keys), torch.stack(values)

    def _filled(self, row: int, packed: torch.Tensor) -> torch.Tensor:
        if self.unused is not None:
            filled = packed.new_zeros(self.heads * self.slots, packed.shape[1])
            filled[~self.unused[row].flatten()] = packed
            packed = filled
        return packed.unflatten(0, (self.heads, self.slots))

    def ends(self) -> torch.Tensor:
        """Where each KV head's entries end among those of its row: LongTensor (batch, kv_heads)."""
        device = self.rows[0][0].tensors[0].device
        if self.unused is None:
            ends = torch.arange(self.slots, self.heads * self.slots + 1, self.slots, device=device)
            return ends.expand(len(self.rows), -1)
        return (~self.unused).sum(2).cumsum(1)

    def select(self, rows: torch.Tensor) -> "_Block":
        return replace(self, rows=[self.rows[row] for row in rows.tolist()], unused=rows_of(self.unused, rows))

    def tensors(self) -> list[torch.Tensor]:
        packed = [tensor for pair in self.rows for part in pair for tensor in part.tensors]
        return packed if self.unused is None else [*packed, self.unused]


class QuantizedStorage(Storage):
    """Low-bit entries: what is kept is quantized once; appended tokens wait in full precision until `residual` of
    them are there, and are then quantized once, as a block of their own.

    Keys are grouped per channel, along the tokens, and values per token, as their outliers lie (KIVI,
    https://arxiv.org/abs/2402.02750, section 3). Each row of the batch is a piece of its own, so that rows can be
    selected without unpacking; rows and heads may differ in length. A decode step attends to packed entries.

    Args:
        kept: right-aligned, with -1 in unused slots; its indices may be None for column = slot.
        pads: as in `DenseStorage`.
        totals: entries of each row, if the host knows.
    """

    is_final = True
    parts = (_Block, Quantized, Quantizer)
    has_forgotten = False  # what is forgotten stays in its block, which is then read and masked
    _pieces: Pieces | None = None  # of the present blocks, once a step asked

    def __init__(self, keys, values, indices, pads, quantizer: Quantizer, residual: int, totals: list[int] | None):
        self.quantizer, self.residual = quantizer, residual
        self.indices, self.unused = None, None
        self.entries = self.length = 0
        self.blocks: list[_Block] = []
        self.recent = DenseStorage(keys[:, :, :0], values[:, :, :0], None, None, residual)
        if indices is not None:
            self.extend(Kept(keys, values, indices, totals=totals), first=0)
            return
        self.unused = None if pads is None else pads[:, None].expand(keys.shape[:3])
        self._add(keys, values, self.unused)
        self.entries = self.length = keys.shape[2]

    @property
    def appended(self) -> int:
        return self.length - self.entries

    def extend(self, kept: Kept, first: int) -> None:
        indices = torch.cat([self.columns(first), kept.indices], dim=2)
        self._flush()
        unused = _unused(kept.indices, kept.totals)
        self._add(kept.keys, kept.values, unused, kept.totals)
        self.unused = None if unused is None and self.unused is None else indices < 0
        self.indices = indices.to(torch.int32)
        self.entries = self.length = indices.shape[2]

    def forget(self, column: int, seen: int) -> None:
        columns = self.columns(seen)
        gone = columns == column
        if bool(gone.any()):  # its slot stays, unused
            self.indices = columns.masked_fill(gone, -1).to(torch.int32)
            self.unused, self.entries, self.has_forgotten = self.indices < 0, self.length, True

    def _flush(self) -> None:
        """Quantize the tokens that wait."""
        if self.recent.length:
            keys, values = self.recent.read()
            self._add(keys, values, None)
        # Also if none waited: forks share the buffer.
        keys, values = self.recent.keys[:, :, :0], self.recent.values[:, :, :0]
        self.recent = DenseStorage(keys, values, None, None, self.residual)

    def _add(
        self, keys: torch.Tensor, values: torch.Tensor, unused: torch.Tensor | None, totals: list[int] | None = None
    ) -> None:
        rows = []
        for row, used in enumerate([slice(None)] * len(keys) if unused is None else _used(unused, totals)):
            row_keys, row_values = keys[row].flatten(0, 1)[used], values[row].flatten(0, 1)[used]
            rows.append((self.quantizer.quantize(row_keys.T), self.quantizer.quantize(row_values)))
        self.blocks.append(_Block(rows, unused, keys.shape[1], keys.shape[2]))
        self._pieces = None

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.recent.append(keys, values)
        self.length += keys.shape[2]
        if self.recent.length >= self.residual:
            self._flush()

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [*(block.unpack() for block in self.blocks), self.recent.read()]
        return torch.cat([keys for keys, _ in parts], dim=2), torch.cat([values for _, values in parts], dim=2)

    @property
    def decodes_in_place(self) -> bool:
        return not self.has_forgotten and has_kernels(self.recent.keys.device)

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        if self._pieces is None:
            ends = torch.stack([block.ends() for block in self.blocks])
            longest = sum(block.slots for block in self.blocks)
            self._pieces = pieces([block.rows for block in self.blocks], ends, longest)
        recent = self.recent
        return grouped_decode(query, self._pieces, recent.keys, recent.values, recent.length, scaling)

    def __getstate__(self) -> dict[str, object]:
        """Leave the addresses out of copies and pickles, whose tensors have others."""
        return {name: value for name, value in vars(self).items() if name != "_pieces"}

    state = __getstate__

    def visible(self) -> torch.Tensor | None:
        if self.unused is None:
            return None
        appended = self.unused.new_zeros(*self.unused.shape[:2], self.length - self.entries)
        return ~torch.cat([self.unused, appended], dim=2)

    def columns(self, seen: int) -> torch.Tensor:
        return columns_of(self, self.recent.keys, seen)

    def select(self, rows: torch.Tensor) -> None:
        self.blocks, self._pieces = [block.select(rows) for block in self.blocks], None
        self.indices, self.unused = rows_of(self.indices, rows), rows_of(self.unused, rows)
        self.recent.select(rows)

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *(tensor for block in self.blocks for tensor in block.tensors())]


def _unused(indices: torch.Tensor, totals: list[int] | None) -> torch.Tensor | None:
    """Return which slots are unused, bool like `indices`; None if all are in use. `totals` are in use, if known."""
    unused = indices < 0
    is_full = not bool(unused.any()) if totals is None else totals == all_slots(indices)
    return None if is_full else unused


def _used(unused: torch.Tensor, totals: list[int] | None) -> list[torch.Tensor]:
    """Return the slots in use of each row, all heads' in order. Where `totals` are unknown the host waits for them."""
    counts = (~unused).sum((1, 2)).tolist() if totals is None else totals
    order = unused.flatten(1).int().argsort(dim=1, stable=True)  # slots in use come first
    return [slots[:count] for slots, count in zip(order, counts, strict=True)]
