"""The memories of several sequences as one batch, for evicting from all of them at once."""

from dataclasses import replace

import torch

from ..device import on_device
from ..policy.policy import Policy
from ..scoring.layer_view import Kept
from .memory import Memory, SequenceLog
from .protected import Protected


class JoinedMemory(Memory):
    """The memories of several sequences as one left-padded batch, for one eviction.

    Attributes:
        result: the entries, with columns counted from the left of the batch.
        shift: LongTensor (rows, 1, 1), the number of columns by which each row is shifted to the right.
    """

    def __init__(
        self,
        policy: Policy,
        memories: list[Memory],
        seen: list[int],
        held: Kept,
        queries: torch.Tensor | None = None,
        decoded: int = 0,
        counts: list[list[int]] | None = None,
    ):
        """Join memories.

        Args:
            seen: tokens of each sequence.
            held: one row per sequence, with the sequence's own columns.
            queries: the latest queries of each sequence, (rows, heads, some, head_dim), NaN where there are none.
            decoded: tokens since the latest eviction.
            counts: entries of `held`, [row][head].
        """
        super().__init__(policy, None)
        columns = self._seen_when_stored = max(seen)
        self.shift = on_device([columns - each for each in seen], held.indices.device)[:, None, None]
        self.result = replace(held, indices=torch.where(held.indices < 0, -1, held.indices + self.shift))
        self._counts = counts
        self.latest_queries, self.decoded = [] if queries is None else [queries], decoded
        logs, first = [memory.log for memory in memories], memories[0]
        self.log = SequenceLog(columns, list(seen), row_seeds=tuple(log.row_seeds[0] for log in logs))
        if logs[0].shares is not None:
            self.log.shares = [[log.shares[layer][0] for log in logs] for layer in range(len(logs[0].shares))]
        self.log.vision, self.log.has_vision = logs[0].vision, logs[0].has_vision
        if logs[0].protected is not None:
            self.log.protected = Protected.joined([log.protected for log in logs], seen)
            self.log.prompt_entries = [log.held_of_prompt()[0] for log in logs]
        for name in ("merge_threshold", "noted"):
            if getattr(first, name) is not None:
                setattr(self, name, torch.cat([getattr(memory, name) for memory in memories]))
        self.rotary, self.attended = first.rotary, first.attended

    @staticmethod
    def kind(memory: Memory) -> tuple:
        """Return a key that is equal for memories that can be joined."""
        noted = None if memory.noted is None else memory.noted.shape[1:]
        alone = id(memory) if memory.rotary is not None else None  # prompts have different positions
        return memory.log.shares is None, memory.merge_threshold is None, noted, alone

    @property
    def has_no_pads(self) -> bool:
        return False

    def held(self) -> list[list[int]] | None:
        return self._counts

    def kept(self) -> Kept:
        return self.result

    def put(self, kept: Kept, seen: int) -> None:
        self.result = kept

    def give_back(self, memories: list[Memory]) -> Kept:
        """Copy the notes to each sequence's memory; return the remaining entries with the sequences' own columns."""
        for row, memory in enumerate(memories):
            for name in ("merge_threshold", "noted"):
                value = getattr(self, name)
                setattr(memory, name, None if value is None else value[row : row + 1])
        indices = self.result.indices
        result = replace(self.result, indices=torch.where(indices < 0, -1, indices - self.shift))
        return result if self.sums is None else replace(result, sums=self.sums)
