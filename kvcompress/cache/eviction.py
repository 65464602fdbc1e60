"""Evictions while decoding: of one cache, or of several sequences at once, as one left-padded batch."""

from dataclasses import replace

import torch

from ..device import on_device
from ..scoring.layer_view import Kept
from .choice import Choice
from .memory import Memory, SequenceLog
from .protected import Protected
from .scope import States

LASTING = ("merge_threshold", "noted")  # attributes of a memory that an eviction passes on to the next


def evict(choice: Choice, memory: Memory, states: States) -> None:
    """Reduce the stored entries, decoded ones included, to the decode budget."""
    queries = torch.cat(memory.latest_queries, dim=2) if memory.latest_queries else None
    kept, seen = replace(memory.kept(), held=memory.storage.held()), memory.seen
    left = left_of(choice, memory, kept, seen, replace(states, queries=queries), memory.has_no_pads)
    memory.reduce_to(kept, left, seen)
    memory.decoded = 0


def left_of(choice: Choice, memory: Memory, kept: Kept, seen: int, states: States, has_no_pads: bool = False) -> Kept:
    """Return what the decode budget leaves of `kept`, the entries of `seen` tokens. Arguments as in `Choice.reduce`."""
    budgets = [choice.policy.decode(length) for length in memory.log.lengths_at(seen)]
    if choice.policy.moves_keys:
        states = replace(states, rotary=memory.rotary)
    return choice.reduce(kept, memory, seen, budgets, states, has_no_pads)


def batch_key(memory: Memory) -> tuple:
    """Return a key that is equal for memories that can be evicted from together."""
    noted = None if memory.noted is None else memory.noted.shape[1:]
    alone = id(memory) if memory.rotary is not None else None  # prompts have different positions
    return memory.log.shares is None, memory.merge_threshold is None, noted, alone


def evict_together(
    choice: Choice, memories: list[Memory], seen: list[int], kept: Kept, states: States, decoded: int
) -> Kept:
    """Return what the decode budget leaves of several sequences; `note_left` stores what later evictions need.

    Args:
        seen: tokens of each sequence.
        kept: one row per sequence, with the sequence's own columns; so is the result.
        states: with the latest queries of each sequence, (rows, heads, some, head_dim), NaN where there are none.
        decoded: tokens since the latest eviction.
    """
    columns, logs, batch = max(seen), [memory.log for memory in memories], Memory(choice.policy, None)
    shift = on_device([columns - each for each in seen], kept.indices.device)[:, None, None]
    aligned = replace(kept, indices=torch.where(kept.indices < 0, -1, kept.indices + shift))
    batch.decoded, batch.rotary = decoded, memories[0].rotary
    batch.log = SequenceLog(columns, list(seen), row_seeds=tuple(log.row_seeds[0] for log in logs))
    if logs[0].shares is not None:
        batch.log.shares = [[log.shares[layer][0] for log in logs] for layer in range(len(logs[0].shares))]
    if logs[0].protected is not None:
        batch.log.protected = Protected.joined([log.protected for log in logs], seen)
        batch.log.prompt_entries = [log.held_of_prompt()[0] for log in logs]
    for name in LASTING:
        if getattr(memories[0], name) is not None:
            setattr(batch, name, torch.cat([getattr(memory, name) for memory in memories]))
    left = left_of(choice, batch, aligned, columns, states)
    if left.indices is aligned.indices:  # nothing was evicted
        return kept if left.sums is None else replace(kept, sums=left.sums)
    return replace(left, indices=torch.where(left.indices < 0, -1, left.indices - shift))


def note_left(memories: list[Memory], kept: Kept, left: Kept) -> None:
    """Store in the sequences' memories what later evictions need of what was `left` of `kept`.

    This is for after `left` has been stored, which may run out of memory, so that an eviction can be tried again."""
    if left.indices is kept.indices:  # nothing was evicted
        return
    for row, memory in enumerate(memories):
        for name in LASTING:
            value = getattr(left, name)
            setattr(memory, name, None if value is None else value[row : row + 1])
