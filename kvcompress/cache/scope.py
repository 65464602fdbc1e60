"""What of a prompt is compressed: all of it, or each row's context, with the question kept as it is."""

from dataclasses import dataclass, replace

import torch

from ..scoring.layer_view import Kept, Prompt


@dataclass
class Part:
    """The columns that a cluster sees: as in `KVCluster.score`, padded on the left.

    Attributes:
        queries: freed (None) once the part is scored.
        source: LongTensor (batch, columns), the prompt's column that each comes from; None where it is the same.
        rest: what is kept of the prompt beside the part; None where the part is all.
        sums: for a cluster that accumulates, what all of the prompt's queries add to each of the prompt's columns,
            (batch, kv_heads, columns). The question's do not steer what is kept of its context, but are remembered.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    prompt: Prompt
    source: torch.Tensor | None = None
    rest: Kept | None = None
    sums: torch.Tensor | None = None

    def in_prompt(self, kept: Kept) -> Kept:
        """What was kept of the part, in the prompt's columns and with the rest behind it."""
        if self.rest is None:
            return kept
        source = self.source[:, None].expand(-1, kept.indices.shape[1], -1)
        indices = source.gather(2, kept.indices.clamp(min=0)).masked_fill(kept.indices < 0, -1)
        whole = right_aligned(joined(replace(kept, indices=indices), self.rest))
        return replace(self.remembered(whole), likeness=kept.likeness)

    def remembered(self, kept: Kept) -> Kept:
        """`kept`, in the prompt's columns, with the sums of its entries."""
        return kept if self.sums is None else replace(kept, memory=self.sums.gather(2, kept.indices.clamp(min=0)))


def context_part(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, prompt: Prompt, context: list[int]
) -> Part:
    """Each row's first `context` real tokens as if they were the whole prompt."""
    columns = keys.shape[2]
    pads = torch.tensor([columns - length for length in prompt.lengths], device=keys.device)
    length = torch.tensor(context, device=keys.device)
    width = max(context)
    # Rows end their context at different columns: shift each so that all are aligned to the right.
    empty = width - length
    source = ((pads - empty)[:, None] + torch.arange(width, device=keys.device)).clamp(min=0)
    if min(context) == width and len(set(prompt.lengths)) == 1:  # nothing is shifted: no copy
        first = columns - prompt.lengths[0]
        taken = [states[:, :, first : first + width] for states in (queries, keys, values)]
    else:
        taken = [_columns_of(states, source) for states in (queries, keys, values)]
    masks = {
        name: None if mask is None else mask.gather(1, source)
        for name, mask in (("vision", prompt.vision), ("protected", prompt.protected))
    }
    padding = empty[:, None] if min(context) < width else None
    rotary = None if prompt.rotary is None else prompt.rotary.columns(source)
    rest = torch.arange(min(context), columns, device=keys.device)  # columns of every row's question, and more
    is_question = (rest >= (pads + length)[:, None])[:, None].expand(-1, keys.shape[1], -1)
    question = Kept(keys[:, :, rest], values[:, :, rest], torch.where(is_question, rest, -1))
    return Part(*taken, replace(prompt, lengths=context, padding=padding, rotary=rotary, **masks), source, question)


def evictable(prompt: Prompt) -> Prompt:
    """Lengths and budgets without what is protected: a layer's or a head's share is one of what can be evicted."""
    fixed = prompt.protected_lengths or (0,) * len(prompt.lengths)
    return replace(
        prompt,
        lengths=[length - n for length, n in zip(prompt.lengths, fixed, strict=True)],
        budgets=[budget - n for budget, n in zip(prompt.budgets, fixed, strict=True)],
    )


def with_budgets(prompt: Prompt, budgets: list[int]) -> Prompt:
    """The prompt with these budgets for what is evictable, and all that is protected besides."""
    fixed = prompt.protected_lengths or (0,) * len(budgets)
    return replace(prompt, budgets=[n + more for n, more in zip(fixed, budgets, strict=True)])


def joined(*parts: Kept) -> Kept:
    """All slots of the parts, one behind the other."""
    memory = [part.memory for part in parts]
    if any(of_part is not None for of_part in memory):
        memory = [
            torch.zeros_like(part.indices, dtype=torch.float32) if of_part is None else of_part
            for part, of_part in zip(parts, memory, strict=True)
        ]
    return Kept(
        torch.cat([part.keys for part in parts], dim=2),
        torch.cat([part.values for part in parts], dim=2),
        torch.cat([part.indices for part in parts], dim=2),
        None if memory[0] is None else torch.cat(memory, dim=2),
    )


def right_aligned(kept: Kept) -> Kept:
    """The same entries with all unused slots, which may stand anywhere, at the front."""
    order = kept.indices.argsort(dim=-1, stable=True)
    rows = order.unsqueeze(-1)
    return Kept(
        kept.keys.gather(2, rows.expand(-1, -1, -1, kept.keys.shape[3])),
        kept.values.gather(2, rows.expand(-1, -1, -1, kept.values.shape[3])),
        kept.indices.gather(2, order),
        None if kept.memory is None else kept.memory.gather(2, order),
    )


def _columns_of(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(batch, heads, width, head_dim): the given columns (batch, width) of each row of the states."""
    return states.gather(2, columns[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))
