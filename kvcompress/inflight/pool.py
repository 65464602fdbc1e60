"""Storage of one layer's entries of many sequences, with a slot for each sequence.

Each KV head of a slot is a segment of one flat buffer: entry i of head h in slot s is row `starts[s, h] + i`. Spare
rows after each segment are reserved for new tokens. A decode step writes `slots * kv_heads` rows, one at the end of
each segment.

- `SlotPool`: all segments have the same length, so one masked attention call reads the buffer unchanged.
- `RaggedSlotPool`: heads differ in length (adaptive budgets) and share the rows of their slot; a decoded token attends
  to the segments in place.
"""

from itertools import accumulate

import torch

from ..device import on_device, runs_triton
from ..kernels.ragged_decode import ragged_decode
from ..kernels.static_decode import static_decode
from ..scoring.layer_view import Kept


class SlotPool:
    """Entries in segments of equal length.

    Args:
        like: entries of one sequence, for shapes and dtypes: `Kept` with a batch of one.
        slots: number of sequences.
        rows: rows of the buffer for each slot, see `rows_for`.
        is_fixed: whether every step has the same shapes; otherwise attention is as long as the longest sequence.
        knows_columns: whether the entries' columns are kept, for later evictions.
    """

    decodes_in_place = False

    def __init__(self, like: Kept, slots: int, rows: int, is_fixed: bool, knows_columns: bool):
        self.slots, self.rows, self.is_fixed = slots, rows, is_fixed
        self.heads, device = like.keys.shape[1], like.keys.device
        # Attention multiplies invisible values by zero, so they must be finite.
        self.keys = like.keys.new_zeros(slots * rows, like.keys.shape[3])
        self.values = like.values.new_zeros(slots * rows, like.values.shape[3])
        self.columns = torch.zeros(slots * rows, dtype=torch.int32, device=device) if knows_columns else None
        self.sums = None if like.sums is None else like.sums.new_zeros(slots * rows)
        of_slot, of_head = torch.arange(slots, device=device) * rows, torch.arange(self.heads, device=device)
        self.starts = of_slot[:, None] + of_head * (rows // self.heads)
        self.lengths = torch.zeros(slots, self.heads, dtype=torch.long, device=device)
        self._places = torch.arange(rows, device=device)
        self._new: tuple[torch.Tensor, ...] | None = None  # rows, keys and values that have not been written yet
        if is_fixed:
            self.decodes_in_place = runs_triton(device)
            self._nothing = torch.zeros(1, dtype=torch.long, device=device)
            # Tensors that the graph writes to or that keep their address, see `StaticStorage`.
            for buffer in (self.keys, self.values, self.columns, self.sums, self.lengths, self.starts, self._nothing):
                if buffer is not None:
                    torch._dynamo.mark_static_address(buffer, guard=False)
        self.steps = 0
        self._placed: dict[int, list[int]] = {}  # by slot in use: its heads' entries minus `steps` at that time

    @staticmethod
    def rows_for(counts: list[int], room: int) -> int:
        """Return the rows of a slot with this many entries in each head and `room` more tokens."""
        return len(counts) * (max(counts) + room)

    def place(self, slots: list[int], kept: Kept, counts: list[list[int]]) -> None:
        """Replace the contents of these slots by one row of `kept` each.

        `kept` is right-aligned, with -1 in unused places. `counts` holds each row's entries by head. Where memory runs
        out the slots are as they were."""
        at, lengths = on_device(slots, self.starts.device), on_device(counts, self.starts.device)
        starts = self._starts_for(slots, at, counts)
        most = kept.indices.shape[2]
        rows = starts[..., None] + self._places[:most] - (most - lengths)[..., None]
        used = slice(None)
        if min(map(min, counts)) < most:  # selected on the host: a mask on the device would cause a wait
            unused = most - torch.tensor(counts)[..., None]
            used = on_device((torch.arange(most) >= unused).flatten().nonzero()[:, 0], rows.device)
        rows = rows.flatten()[used]
        parts = [(self.keys, kept.keys.flatten(0, 2)[used]), (self.values, kept.values.flatten(0, 2)[used])]
        if self.columns is not None:
            parts.append((self.columns, kept.indices.flatten()[used].int()))
        if self.sums is not None:
            parts.append((self.sums, kept.sums.flatten()[used]))
        # All of it is there: from here on nothing needs memory.
        self._lay_out(slots, at, counts, starts)
        self.lengths.index_copy_(0, at, lengths)
        for buffer, part in parts:
            buffer.index_copy_(0, rows, part)
        for slot, of_heads in zip(slots, counts, strict=True):
            self._placed[slot] = [count - self.steps for count in of_heads]

    def _starts_for(self, slots: list[int], at: torch.Tensor, counts: list[list[int]]) -> torch.Tensor:
        """Return where the segments of these slots (also as a tensor, `at`) will begin, (slots, kv_heads)."""
        return self.starts[at]

    def _lay_out(self, slots: list[int], at: torch.Tensor, counts: list[list[int]], starts: torch.Tensor) -> None:
        """Set where the segments of these slots begin and end."""

    def free(self, slot: int) -> None:
        """Drop the contents of a slot."""
        self.lengths[slot] = 0
        del self._placed[slot]

    def append(self, keys: torch.Tensor, values: torch.Tensor, columns: torch.Tensor, active: torch.Tensor) -> None:
        """Append a token's states (slots, kv_heads, 1, head_dim) to each sequence.

        `columns` is a LongTensor (slots,); `active` is bool (slots,), False if a slot is free, where the write has no
        effect."""
        rows = (self.starts + self.lengths).flatten()
        self._new = rows, keys, values
        if not (self.is_fixed and self.decodes_in_place):
            self._write()
        if self.columns is not None:
            self.columns.index_copy_(0, rows, columns.int().repeat_interleave(self.heads))
        if self.sums is not None:
            self.sums.index_fill_(0, rows, 0)
        self.lengths.add_(active[:, None])
        if not torch.compiler.is_compiling():
            self.steps += 1

    def _write(self) -> None:
        """Write the latest token to its rows, unless attention has done so."""
        if self._new is not None:
            rows, keys, values = self._new
            self._new = None
            self.keys.index_copy_(0, rows, keys.reshape(-1, keys.shape[3]))
            self.values.index_copy_(0, rows, values.reshape(-1, values.shape[3]))

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend with one token's queries (slots, heads, 1, head_dim), and write its key and value.

        The result has the same shape as the queries."""
        (_, *new), self._new = self._new or (None, None, None), None
        segments = self.keys, self.values, self.starts, self.lengths.clamp(min=1), self._nothing
        return static_decode(query, *new, *segments, self.rows // self.heads, scaling)

    def take_back(self, steps: int) -> None:
        """Restore the state after this many steps."""
        self.steps, self._new = steps, None
        for slot, placed in self._placed.items():
            self.lengths[slot] = on_device(placed, self.lengths.device) + steps

    @property
    def longest(self) -> int:
        """Number of entries of the longest head."""
        most = max((max(counts) for counts in self._placed.values()), default=1 - self.steps)
        return max(most + self.steps, 1)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (slots, kv_heads, length, head_dim), aligned to the left."""
        self._write()
        keys, values = (part.view(self.slots, self.heads, -1, part.shape[1]) for part in (self.keys, self.values))
        return keys[:, :, : self._shown], values[:, :, : self._shown]

    def visible(self) -> torch.Tensor:
        """Return bool (slots, kv_heads, length), False where `read` has no entry. A free slot shows one, for its
        softmax."""
        return self._places[: self._shown] < self.lengths.clamp(min=1)[..., None]

    @property
    def _shown(self) -> int:
        return self.rows // self.heads if self.is_fixed else self.longest

    def kept(self, slots: list[int]) -> Kept:
        """Return the entries of these slots, one row each, aligned to the right; columns only if they are kept."""
        held = [[placed + self.steps for placed in self._placed[slot]] for slot in slots]
        at = on_device(slots, self.starts.device)
        lengths = self.lengths[at]
        most = max(map(max, held))
        place = self._places[:most] - (most - lengths)[..., None]
        rows = self.starts[at][..., None] + place.clamp(min=0)
        columns = place if self.columns is None else self.columns[rows].long()
        sums = None if self.sums is None else self.sums[rows]
        return Kept(self.keys[rows], self.values[rows], columns.masked_fill(place < 0, -1), sums, held=held)

    def resized(self, slots: int, rows: int, moves: dict[int, int]) -> "SlotPool":
        """Return a pool of the same kind whose slot `moves[slot]` has the contents of `slot`."""
        kept = self.kept(list(moves))
        pool = type(self)(kept, slots, rows, self.is_fixed, self.columns is not None)
        pool.steps = self.steps
        pool.place(list(moves.values()), kept, kept.held)
        return pool

    @property
    def nbytes(self) -> int:
        parts = (self.keys, self.values, self.columns, self.sums, self.starts, self.lengths)
        return sum(part.nbytes for part in parts if part is not None)


class RaggedSlotPool(SlotPool):
    """A `SlotPool` for heads that differ in length."""

    decodes_in_place = True

    def __init__(self, like: Kept, slots: int, rows: int, is_fixed: bool, knows_columns: bool):
        super().__init__(like, slots, rows, is_fixed, knows_columns)
        even = rows // self.heads
        self._ends = [[even * (head + 1) for head in range(self.heads - 1)] + [rows] for _ in range(slots)]

    @staticmethod
    def rows_for(counts: list[int], room: int) -> int:
        return sum(counts) + len(counts) * room

    def _starts_for(self, slots: list[int], at: torch.Tensor, counts: list[list[int]]) -> torch.Tensor:
        starts = [
            [slot * self.rows + end for end in (0, *self._ends_for(of_heads)[:-1])]
            for slot, of_heads in zip(slots, counts, strict=True)
        ]
        return on_device(starts, self.starts.device)

    def _ends_for(self, counts: list[int]) -> list[int]:
        """Return where the segments of a slot end, of which each has as many spare rows; the last has the rest."""
        spare = (self.rows - sum(counts)) // self.heads
        return [*accumulate(count + spare for count in counts[:-1]), self.rows]

    def _lay_out(self, slots: list[int], at: torch.Tensor, counts: list[list[int]], starts: torch.Tensor) -> None:
        self.starts.index_copy_(0, at, starts)
        for slot, of_heads in zip(slots, counts, strict=True):
            self._ends[slot] = self._ends_for(of_heads)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        places = self._places[: self._shown]
        rows = self.starts[..., None] + torch.where(places < self.lengths[..., None], places, 0)
        return self.keys[rows], self.values[rows]

    @property
    def _shown(self) -> int:
        return self.longest

    def decode(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend with one token's queries (slots, heads, 1, head_dim); the result has the same shape."""
        segments = self.keys, self.values, self.starts, self.lengths.clamp(min=1), self.longest
        return ragged_decode(query, *segments, self._sizes, scaling)

    def _sizes(self) -> list[int]:
        """Return the used and spare rows of the buffer, in turn, for every head of every slot."""
        sizes = []
        for slot in range(self.slots):
            placed, first = self._placed.get(slot), 0
            for head, end in enumerate(self._ends[slot]):
                length = 1 if placed is None else placed[head] + self.steps
                sizes += [length, end - first - length]
                first = end
        return sizes
