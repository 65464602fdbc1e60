"""The part of a prompt to choose among: all of it, or each row's context, in which case the question is kept
unchanged."""

from dataclasses import dataclass, replace

import torch

from ..device import on_device
from ..scoring.layer_view import Kept, LayerView
from ..scoring.rotary import Rotary
from ..scoring.selection import ADAPTIVE


@dataclass(frozen=True)
class States:
    """The inputs of one layer's attention in a forward pass.

    Attributes:
        queries: (batch, heads, new, head_dim), rotated; while decoding evicts, the remembered ones or None.
        scaling: factor of q·k before the softmax.
        module: the model's attention module.
        rotary: the rotation of the pass's queries, if the method wants them unrotated.
        keys, values: (batch, kv_heads, new, head_dim), of a prompt's new tokens alone; None in other passes.
    """

    queries: torch.Tensor | None
    scaling: float
    module: torch.nn.Module
    rotary: Rotary | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


@dataclass
class Candidates:
    """The columns that a cluster sees, as in `KVCluster.score`, padded on the left.

    Attributes:
        queries: freed (None) once the columns are scored.
        source: LongTensor (batch, columns), the prompt's column of each candidate; None if they are the same.
        question: the entries kept of the rest of the prompt; None if the candidates are the whole prompt.
        sums: if the policy carries sums, what all of the prompt's queries add to each of its columns, (batch, kv_heads,
            columns). The question's queries do not influence the choice, but later ones.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    view: LayerView
    source: torch.Tensor | None = None
    question: Kept | None = None
    sums: torch.Tensor | None = None

    def in_prompt(self, kept: Kept) -> Kept:
        """Return the kept candidates with the prompt's columns, followed by the question."""
        if self.question is None:
            return kept
        source = self.source[:, None].expand(-1, kept.indices.shape[1], -1)
        indices = source.gather(2, kept.indices.clamp(min=0)).masked_fill(kept.indices < 0, -1)
        whole = right_aligned(joined(replace(kept, indices=indices), self.question))
        sums = whole.sums
        if self.sums is not None:  # a row without a question has chosen by all of its queries
            has_question = (self.question.indices >= 0).any(-1, keepdim=True)
            sums = torch.where(has_question, self.with_sums(whole).sums, sums)
        return replace(whole, sums=sums, merge_threshold=kept.merge_threshold, noted=kept.noted)

    def with_sums(self, kept: Kept) -> Kept:
        """Add the sums of the entries of `kept`, whose indices are the prompt's columns."""
        return kept if self.sums is None else replace(kept, sums=self.sums.gather(2, kept.indices.clamp(min=0)))


def fills_all_slots(view: LayerView) -> bool:
    """Whether every row and head keeps equally many entries under `view`'s budgets, so that no slot is unused."""
    return view.padding is None and len(set(view.budgets)) == 1 and view.settings.head_budget not in ADAPTIVE


def context_of(states: States, view: LayerView, context: list[int]) -> Candidates:
    """Return each row's first `context` real tokens as if they were the whole prompt."""
    keys = states.keys
    columns = keys.shape[2]
    pads = on_device([columns - length for length in view.lengths], keys.device)
    length = on_device(context, keys.device)
    width = max(context)
    # Rows' contexts end at different columns: shift them so that all are aligned to the right.
    empty = width - length
    source = ((pads - empty)[:, None] + torch.arange(width, device=keys.device)).clamp(min=0)
    whole = (states.queries, states.keys, states.values)
    if min(context) == width and len(set(view.lengths)) == 1:  # nothing is shifted: no copy
        first = columns - view.lengths[0]
        taken = [each[:, :, first : first + width] for each in whole]
    else:
        rows = source[:, None, :, None]
        taken = [each.gather(2, rows.expand(-1, each.shape[1], -1, each.shape[3])) for each in whole]
    is_real = torch.arange(width, device=keys.device) >= empty[:, None]
    masks = {
        name: None if mask is None else mask.gather(1, source) & is_real
        for name, mask in (("vision", view.vision), ("protected", view.protected))
    }
    masks["groups"] = None if view.groups is None else view.groups.gather(1, source)
    padding = empty[:, None] if min(context) < width else None
    rotary = None if view.rotary is None else view.rotary.columns(source)
    rest = torch.arange(min(context), columns, device=keys.device)  # columns of every row's question, and more
    is_question = (rest >= (pads + length)[:, None])[:, None].expand(-1, keys.shape[1], -1)
    question = Kept(keys[:, :, rest], states.values[:, :, rest], torch.where(is_question, rest, -1))
    view = replace(view, lengths=context, padding=padding, rotary=rotary, **masks)
    return Candidates(*taken, view, source, question)


def evictable(view: LayerView) -> LayerView:
    """Subtract the protected columns from lengths and budgets, since layers and heads only share what can be
    evicted."""
    fixed = view.protected_lengths or (0,) * len(view.lengths)
    return replace(
        view,
        lengths=[length - n for length, n in zip(view.lengths, fixed, strict=True)],
        budgets=[budget - n for budget, n in zip(view.budgets, fixed, strict=True)],
    )


def with_budgets(view: LayerView, budgets: list[int]) -> LayerView:
    """Return the view with these budgets of evictable entries, plus everything protected."""
    fixed = view.protected_lengths or (0,) * len(budgets)
    own = [n + more for n, more in zip(fixed, budgets, strict=True)]
    return replace(view, budgets=own, mean_budgets=tuple(view.budgets))


def joined(one: Kept, other: Kept) -> Kept:
    """Concatenate the slots of both. If only one has sums, those of the other are 0."""
    if one.sums is None and other.sums is not None:
        one = replace(one, sums=torch.zeros_like(one.indices, dtype=torch.float32))
    if other.sums is None and one.sums is not None:
        other = replace(other, sums=torch.zeros_like(other.indices, dtype=torch.float32))
    return Kept(
        torch.cat([one.keys, other.keys], dim=2),
        torch.cat([one.values, other.values], dim=2),
        torch.cat([one.indices, other.indices], dim=2),
        None if one.sums is None else torch.cat([one.sums, other.sums], dim=2),
    )


def right_aligned(kept: Kept) -> Kept:
    """Move all unused slots, which may be anywhere, to the front."""
    order = kept.indices.argsort(dim=-1, stable=True)
    rows = order.unsqueeze(-1)
    return Kept(
        kept.keys.gather(2, rows.expand(-1, -1, -1, kept.keys.shape[3])),
        kept.values.gather(2, rows.expand(-1, -1, -1, kept.values.shape[3])),
        kept.indices.gather(2, order),
        None if kept.sums is None else kept.sums.gather(2, order),
    )
