"""Evictions while decoding: of one layer, or of several memories at once, as one left-padded batch."""

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
    left = left_of(choice, memory, kept, seen, replace(states, queries=queries), has_no_pads=memory.has_no_pads)
    memory.reduce_to(kept, left)


def left_of(choice: Choice, memory: Memory, kept: Kept, seen: int, states: States, **further: object) -> Kept:
    """Return what the decode budget leaves of `kept`, the entries of `seen` tokens. Arguments as in `Choice.reduce`."""
    budgets = [choice.policy.decode(length) for length in memory.log.lengths_at(seen)]
    if choice.policy.moves_keys:
        states = replace(states, rotary=memory.rotary)
    return choice.reduce(kept, memory, seen, budgets, states, **further)


def batch_key(memory: Memory) -> tuple:
    """Return a key that is equal for memories that can be evicted from together."""
    noted = None if memory.noted is None else memory.noted.shape[1:]
    alone = id(memory) if memory.rotary is not None else None  # prompts have different positions
    return memory.log.shares is None, memory.merge_threshold is None, noted, alone


def evict_together(
    choice: Choice,
    memories: list[Memory],
    seen: list[int],
    kept: Kept,
    states: States,
    decoded: int,
    **further: object,
) -> Kept:
    """Return what the decode budget leaves of several sequences, or of several layers of the same.

    Args:
        seen: columns of each memory.
        kept: the memories' rows, one after another, with the memories' own columns; so is the result.
        states: with the latest queries of each row, (rows, heads, some, head_dim), NaN where there are none.
        decoded: tokens since the latest eviction.
        further: further arguments of `Choice.reduce`.
    """
    columns, logs, batch = max(seen), [memory.log for memory in memories], Memory(choice.policy, None)
    aligned, shift = kept, None
    if min(seen) < columns:
        missing = [columns - each for each, log in zip(seen, logs, strict=True) for _ in log.lengths]
        shift = on_device(missing, kept.indices.device)[:, None, None]
        aligned = replace(kept, indices=torch.where(kept.indices < 0, -1, kept.indices + shift))
    batch.decoded, batch.rotary = decoded, memories[0].rotary
    lengths = [n for each, log in zip(seen, logs, strict=True) for n in log.lengths_at(each)]
    batch.log = SequenceLog(columns, lengths, row_seeds=tuple(seed for log in logs for seed in log.row_seeds))
    if logs[0].shares is not None:
        of_layers = zip(*(log.shares for log in logs), strict=True)
        batch.log.shares = [[share for of_memory in layer for share in of_memory] for layer in of_layers]
    if logs[0].protected is not None:
        batch.log.protected = Protected.joined([log.protected for log in logs], seen)
        if choice.policy.protect.whole_prompt:
            batch.log.prompt_entries = [entries for log in logs for entries in log.held_of_prompt()]
    for name in LASTING:
        if getattr(memories[0], name) is not None:
            setattr(batch, name, torch.cat([getattr(memory, name) for memory in memories]))
    left = left_of(choice, batch, aligned, columns, states, **further)
    if left.indices is aligned.indices:  # nothing was evicted
        return kept if left.sums is None else replace(kept, sums=left.sums)
    if shift is None:
        return left
    return replace(left, indices=torch.where(left.indices < 0, -1, left.indices - shift))


def note_left(memories: list[Memory], kept: Kept, left: Kept) -> None:
    """Store in the memories of several sequences what later evictions need of what was `left` of `kept`.

    This is for after `left` has been stored, which may run out of memory, so that an eviction can be tried again."""
    if left.indices is kept.indices:  # nothing was evicted
        return
    for row, memory in enumerate(memories):
        for name in LASTING:
            value = getattr(left, name)
            setattr(memory, name, None if value is None else value[row : row + 1])
