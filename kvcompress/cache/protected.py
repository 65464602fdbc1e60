"""What `protect=` and `protect_text=` keep from the evictions that follow a prompt."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ..device import on_device
from ..errors import KVCompressError, shown
from ..policy.passages import Decoder, passage_mask
from ..policy.policy import Policy


@dataclass(frozen=True)
class Protected:
    """The tokens of a sequence that evictions after its prompt may not drop.

    Attributes:
        mask: bool (batch, columns), True at these tokens; later columns are not among them.
        tokens: how many of each row.
        entries: how many of them are stored, as a mean over layers and KV heads.
    """

    mask: torch.Tensor
    tokens: list[int]
    entries: list[int]

    def piece(self, start: int, stop: int) -> "Protected":
        """Return those of some columns of a prompt in pieces, all of which are stored."""
        mask = self.mask[:, start:stop]
        counts = mask.sum(1).tolist()
        return Protected(mask, counts, counts)

    def after(self, before: "Protected | None", first: int) -> "Protected":
        """Return these tokens, which begin at column `first`, behind those of earlier prompts."""
        if before is None:
            return replace(self, mask=F.pad(self.mask, (first, 0)))
        earlier = F.pad(before.mask, (0, first - before.mask.shape[1]))
        return Protected(
            torch.cat([earlier, self.mask], dim=1),
            [a + b for a, b in zip(before.tokens, self.tokens, strict=True)],
            [a + b for a, b in zip(before.entries, self.entries, strict=True)],
        )

    def rows(self, rows: torch.Tensor) -> "Protected":
        """Return some rows, LongTensor (rows,)."""
        order = rows.tolist()
        mask = self.mask[rows.to(self.mask.device)]
        return Protected(mask, [self.tokens[row] for row in order], [self.entries[row] for row in order])

    def among(self, columns: torch.Tensor) -> torch.Tensor:
        """Return which entries are protected: bool like `columns` (batch, kv_heads, entries), as in `Kept.indices`."""
        mask = F.pad(self.mask.to(columns.device), (0, 1))  # later columns, and -1, become one behind the last
        at = columns.clamp(max=self.mask.shape[1]).remainder(mask.shape[1]).long()
        return mask[:, None].expand(-1, columns.shape[1], -1).gather(2, at)

    @classmethod
    def joined(cls, parts: "list[Protected]", seen: list[int]) -> "Protected":
        """Return those of several batches of `seen` columns as one batch, aligned to the right."""
        width = max(seen)
        masks = [
            F.pad(part.mask, (width - length, length - part.mask.shape[1]))
            for part, length in zip(parts, seen, strict=True)
        ]
        tokens, entries = ([n for part in parts for n in getattr(part, name)] for name in ("tokens", "entries"))
        return cls(torch.cat(masks), tokens, entries)


def protected_tokens(
    policy: Policy,
    ids: torch.Tensor | None,
    decode: Decoder | None,
    lengths: list[int],
    context: list[int],
    vision: torch.Tensor | None,
    columns: int,
    is_first: bool,
    device: torch.device,
) -> dict[str, object]:
    """Return the fields of `NewTokens` about what is protected in a prompt; none without `protect=` and
    `protect_text=`.

    Takes fields of `NewTokens`, with `ids` and `vision` on the host. The masks are on `device`.

    Raises:
        KVCompressError: for what `Spans.mask` and `passage_mask` refuse, and if a budget has no room for what is
            protected.
    """
    spans = policy.protect
    if spans is None:
        return {}
    mask = spans.mask(lengths, vision, columns, is_first)
    if is_first and policy.passages:
        mask |= passage_mask(decode, policy.passages, ids, lengths)
    begins = columns - torch.tensor(lengths)[:, None]
    ends = begins + torch.tensor(context)[:, None]
    places = torch.arange(columns)
    counts, in_context = mask.sum(1).tolist(), (mask & (places < ends)).sum(1).tolist()
    for row, (length, protected) in enumerate(zip(context, in_context, strict=True)):
        # Chunks of a later prompt share the budget of all tokens so far: `check_together`.
        if length and (is_first or policy.engine.prefill_chunk is None):
            most = policy.budget(length)
            _check(policy, row, protected, most, f"the budget keeps {most}")
    protected = on_device(mask, device)
    lasting = Protected(protected, counts, counts)
    if spans.whole_prompt:
        kept = [length - scored + policy.budget(scored) for length, scored in zip(lengths, context, strict=True)]
        lasting = Protected(on_device(places >= begins, device), lengths, kept)
    if policy.decode is not None and is_first:  # later: `check_together`
        for row, (length, entries) in enumerate(zip(lengths, lasting.entries, strict=True)):
            most = policy.decode(length + policy.decode_interval)  # at the first eviction
            _check(policy, row, entries + 1, most, f"{most} stay while decoding, the latest among them")
    return {"protected": protected, "protected_lengths": tuple(in_context), "lasting": lasting}


def check_together(policy: Policy, before: Protected | None, new: Protected | None, lengths: list[int]) -> None:
    """Raise KVCompressError if what is protected of earlier prompts and of a new one has no room at the next eviction,
    or in chunks; `lengths` are each row's real tokens, the new ones included."""
    if before is None or new is None:
        return
    for row, (length, *entries) in enumerate(zip(lengths, before.entries, new.entries, strict=True)):
        if policy.engine.prefill_chunk is not None:
            most = policy.budget(length)
            _check(policy, row, sum(entries), most, f"the budget keeps {most}")
        if policy.decode is not None:
            most = policy.decode(length + policy.decode_interval)
            _check(policy, row, sum(entries) + 1, most, f"{most} stay while decoding, the latest among them")


def _check(policy: Policy, row: int, needed: int, room: int, what: str) -> None:
    if needed > room:
        given = {name: getattr(policy.engine, name) for name in ("protect", "protect_text")}
        named = " with ".join(f"{name}={shown(value)}" for name, value in given.items() if value is not None)
        raise KVCompressError(f"{named} needs {needed} entries in row {row}, but {what}: give a larger one")
