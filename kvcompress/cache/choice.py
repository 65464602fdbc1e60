"""`Choice`: applies the policy to one layer. It builds a cluster's view and calls the cluster; no state."""

from dataclasses import replace

import torch

from ..clusters.base import KVCluster
from ..device import on_device
from ..errors import KVCompressError
from ..scoring.layer_view import SEVERAL, Kept, LayerView, RowLayer, StoredEntries, all_slots
from ..scoring.returned import check_kept, check_measured, checked_rows, unchanged
from ..scoring.rotary import Rotary
from ..scoring.rows import scores_of
from ..scoring.selection import ADAPTIVE
from ..scoring.windows import BLOCK, pad_columns
from .layer_policy import LayerPolicy
from .memory import Memory
from .new_tokens import NewTokens
from .scope import Candidates, States, context_of, evictable, fills_all_slots, with_budgets


class Choice(LayerPolicy):
    """The choices that follow from one layer's policy."""

    # -- a prompt

    def view(self, tokens: NewTokens, budgets: list[int], states: States, memory: Memory) -> LayerView:
        """Return a cluster's view of a prompt; `memory` holds what came before it."""
        device, earlier = states.keys.device, None
        if memory.storage is not None and type(self.policy.cluster).note is not KVCluster.note:
            earlier = (memory.storage.columns(memory.seen) >= 0).sum(2)
        vision = None if tokens.vision is None else tokens.vision.to(device)
        protected, counts = tokens.protected, tokens.protected_lengths
        if self.policy.engine.ratio_of == "vision":
            protected = ~vision
            counts = tuple(n - images for n, images in zip(tokens.context, tokens.vision_lengths, strict=True))
        return LayerView(
            self.place,
            self.num_layers,
            tokens.lengths,
            budgets,
            states.scaling,
            padding=None if tokens.padding is None else tokens.padding.to(device),
            vision=vision,
            frame_tokens=tokens.frame_tokens,
            question_lengths=tokens.question_lengths if tokens.context == tokens.lengths else (),
            protected=None if protected is None else protected.to(device),
            protected_lengths=counts,
            groups=None if tokens.groups is None else tokens.groups.to(device),
            row_seeds=tokens.row_seeds,
            module=states.module,
            rotary=states.rotary,
            settings=self.settings,
            merge_threshold=memory.merge_threshold,
            earlier=earlier,
        )

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor | None:
        """Return the column sums of a prompt's queries in fp32, if the policy carries sums.

        What a step adds to a sum in 16 bits is soon less than its last digit."""
        return self.policy.cluster.observe(queries, keys, view).float() if self.policy.carries_sums else None

    def candidates(self, states: States, view: LayerView, tokens: NewTokens, sums: torch.Tensor | None) -> Candidates:
        """Return the entries of a prompt to choose among; `sums` are those of all its queries."""
        if tokens.context == view.lengths:
            return Candidates(states.queries, states.keys, states.values, replace(view, sums=sums))
        part = context_of(states, replace(view, question_lengths=tokens.question_lengths), tokens.context)
        part.sums = sums
        if max(tokens.context):
            part.view = replace(part.view, sums=self.observe(part.queries, part.keys, part.view))
        return part

    def of_whole(
        self, states: States, view: LayerView, tokens: NewTokens, sums: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what later choices need of a prompt that is kept whole, the same as of one that is compressed: its
        sums and `Kept.noted`."""
        if self.policy.decode is None:
            return sums, None
        cluster, part = self.policy.cluster, self.candidates(states, view, tokens, sums)
        if sums is not None:  # the context's entries have sums over the whole prompt's queries
            is_whole = [of_row == length for of_row, length in zip(tokens.context, view.lengths, strict=True)]
            is_whole = on_device(is_whole, sums.device)[:, None, None]
            sums = torch.where(is_whole, cluster.carried(sums, view), sums)
        return sums, self._note_of_all(part.keys, part.values, part.view)

    @property
    def waits(self) -> bool:
        """Whether the choice needs all layers or a second pass."""
        return self.policy.layer_budget.is_measured or self.policy.cluster.second_pass

    def keep(self, candidates: Candidates) -> Kept:
        """Choose the entries of a prompt to keep."""
        shares = self.policy.layer_budget.budgets(evictable(candidates.view))
        view = with_budgets(candidates.view, shares[self.place])
        kept = self._chosen(self._queries(candidates), candidates.keys, candidates.values, view)
        return self._counted(candidates, kept, view)

    def _chosen(self, queries: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> Kept:
        """Return what `update_kv` returns. Raises KVCompressError if it is no `Kept` of columns of these keys."""
        cluster = self.policy.cluster
        kept = cluster.update_kv(queries, keys, values, view)
        if type(cluster).update_kv is not KVCluster.update_kv:
            check_kept(kept, f"{type(cluster).__name__}.update_kv", keys, values, view)
        return kept

    def assess(self, candidates: Candidates) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Score a prompt that waits, and measure it for the layer budget rule.

        Returns the scores and the measurement, None if the rule measures nothing."""
        rule, view = self.policy.layer_budget, candidates.view
        scores = scores_of(
            self.policy.cluster.score, self._queries(candidates), candidates.keys, candidates.values, view
        )
        measured = None
        if rule.is_measured:
            states, place = (candidates.queries, candidates.keys, candidates.values), f"{type(rule).__name__}.measure"
            with unchanged(place, *states, scores):
                measured = rule.measure(*states, scores, view)
            measured = checked_rows(measured, place, len(scores))
            if rule.measures_shares:
                check_measured(measured, place, states, view)
        return scores, measured

    def keep_scored(self, candidates: Candidates, scores: torch.Tensor, budgets: list[int]) -> Kept:
        """Like `keep`, for a prompt that waited. `budgets` holds each row's budget of evictable entries."""
        view = with_budgets(candidates.view, budgets)
        kept = self.policy.cluster.keep(scores, candidates.keys, candidates.values, view)
        return self._counted(candidates, kept, view)

    def _counted(self, candidates: Candidates, kept: Kept, view: LayerView) -> Kept:
        """Return `kept` with the prompt's columns, and with `Kept.totals` if they follow from the budgets of `view`."""
        kept = candidates.in_prompt(kept)
        if candidates.question is not None:
            return kept
        if self._fills_all_slots(view):
            return replace(kept, totals=all_slots(kept.indices))
        held = [[length] * kept.indices.shape[1] for length in view.lengths]
        return replace(kept, totals=self._totals(view.budgets, held))

    def _totals(self, budgets: list[float], held: list[list[int]]) -> list[int] | None:
        """Return the number of entries that each row keeps of `held`, [row][head], under its budget.

        None for a method that may keep fewer."""
        if not self._fills_budget:
            return None
        if self.policy.head_budget in ADAPTIVE:
            return [min(round(budget * len(row)), sum(row)) for budget, row in zip(budgets, held, strict=True)]
        return [sum(row) for row in self._left(budgets, held)]

    def _left(self, budgets: list[float], held: list[list[int]]) -> list[list[int]] | None:
        """Like `_totals`, for each head; None for adaptive heads."""
        if not self._fills_budget or self.policy.head_budget in ADAPTIVE:
            return None
        return [[min(budget, of_head) for of_head in row] for budget, row in zip(budgets, held, strict=True)]

    def _fills_all_slots(self, view: LayerView) -> bool:
        return fills_all_slots(view) and self._fills_budget

    @property
    def _fills_budget(self) -> bool:
        """Whether a choice keeps all that budgets allow. One that overrides the selection may keep fewer, unless its
        cluster says that it does not."""
        own = type(self.policy.cluster)
        overrides = any(getattr(own, name) is not getattr(KVCluster, name) for name in ("update_kv", "keep", "select"))
        return own.fills_budget or not overrides

    # -- stored entries, while decoding or with a later chunk

    def reduce(
        self,
        kept: Kept,
        memory: Memory,
        seen: int,
        budgets: list[int],
        states: States,
        stays: list[bool] | None = None,
        own: list[int] | None = None,
        **further: object,
    ) -> Kept:
        """Choose among stored and newer entries.

        Args:
            kept: all of the entries, with `Kept.held` if it is known.
            memory: what lasted since earlier choices.
            seen: columns of the sequence so far.
            budgets: entries to keep, as a mean over the layers.
            states: with all remembered queries, or a chunk's.
            stays: the rows that keep everything, whatever their budget.
            own: each row's entries in its own layer, if rows belong to different ones, `row_layers`.
            further: further arguments of `_stored`.

        Returns:
            The entries that the cluster keeps. If it keeps everything, these are the entries of `kept` with their new
                sums and, in a later chunk, `Kept.noted`.
        """
        lengths = memory.log.lengths_at(seen)
        # Layers share a row's budget by its tokens, which are the same for all, not by the entries that each holds.
        own = own or self.own_budgets(budgets, lengths, memory.log)
        kept, view = self._stored(kept, memory, seen, budgets, states, **further)
        held, entries = kept.held, [max(of_heads) for of_heads in kept.held]
        budgets = [
            most if all_stay else min(share, most)
            for share, most, all_stay in zip(own, entries, stays or [False] * len(lengths), strict=True)
        ]
        view = replace(view, lengths=entries, budgets=budgets, mean_budgets=tuple(view.budgets))
        if budgets == entries:
            return self._all_of(kept, view)
        voters = states.queries
        if voters is not None and not (view.stored.reading and self.policy.cluster.unrotated_queries):
            voters = self.voters(voters)  # of a chunk, statistics of unrotated queries are of all, as in a first chunk
        result = self._chosen(voters, kept.keys, kept.values, view)
        if self._fills_all_slots(view):
            return replace(result, indices=kept.indices.gather(2, result.indices), totals=all_slots(result.indices))
        columns = kept.indices.gather(2, result.indices.clamp(min=0)).masked_fill_(result.indices < 0, -1)
        return replace(result, indices=columns, totals=self._totals(budgets, held), held=self._left(budgets, held))

    def settle(self, memory: Memory, states: States) -> None:
        """Add to the sums of the stored entries what the tokens since the latest eviction add, for a later prompt."""
        kept, lengths = replace(memory.kept(), held=memory.storage.held()), memory.log.lengths_at(memory.seen)
        states = replace(states, queries=torch.cat(memory.latest_queries, dim=2))
        kept, _ = self._stored(kept, memory, memory.seen, lengths, states, memory.has_no_pads)
        memory.sums = kept.sums
        memory.decoded, memory.latest_queries = 0, []

    def _stored(
        self,
        kept: Kept,
        memory: Memory,
        seen: int,
        budgets: list[int],
        states: States,
        has_no_pads: bool = False,
        reading: bool = False,
        row_layers: tuple[RowLayer, ...] = (),
        **vision: object,
    ) -> tuple[Kept, LayerView]:
        """Return entries with `Kept.held` and their present sums, and a view of them.

        Args, beside those of `reduce`:
            has_no_pads: as in `Memory`; if it is False and `Kept.held` unknown, pads are counted, which waits for the
                device.
            reading: as in `StoredEntries`.
            row_layers, vision: fields of `LayerView`; the latter about vision tokens.
        """
        log, (rows, kv_heads, slots) = memory.log, kept.indices.shape
        lengths, held, padding = log.lengths_at(seen), kept.held, None
        if held is not None:
            padding = on_device(slots - torch.tensor(held), kept.indices.device)
        elif has_no_pads:
            held = [[slots] * kv_heads] * rows
        else:
            padding = (kept.indices < 0).sum(-1)
            held = (slots - padding).tolist()
        view = LayerView(
            SEVERAL if row_layers else self.place,
            self.num_layers,
            lengths,
            budgets,
            states.scaling,
            padding=padding,
            row_seeds=log.row_seeds,
            module=states.module,
            rotary=states.rotary,
            settings=self.settings,
            row_layers=row_layers,
            stored=StoredEntries(kept.indices, seen, tuple(lengths), reading),
            merge_threshold=memory.merge_threshold,
            noted=None if reading else memory.noted,
            protected=log.protected and log.protected.among(kept.indices),
            protected_lengths=self.protected_lengths(log),
            **vision,
        )
        if self.policy.carries_sums:
            new = states.queries if reading else states.queries[:, :, -memory.decoded :]
            view = replace(view, sums=kept.sums + self._added(new, kept.keys, view))
        return replace(kept, held=held, sums=view.sums), view

    def _all_of(self, kept: Kept, view: LayerView) -> Kept:
        """Return the result of a choice among stored entries that keeps all of them."""
        if view.stored.reading:  # for decoding, even if the last chunk evicts nothing
            kept = replace(kept, noted=self._note_of_all(kept.keys, kept.values, view))
        sums = None if kept.sums is None else self.policy.cluster.carried(kept.sums, view)
        return replace(kept, sums=sums, totals=all_slots(kept.indices) if view.padding is None else None)

    def known_features(self, features: torch.Tensor | None) -> torch.Tensor:
        """Return what the cluster computed from the pass's hidden states, for a method that reads them."""
        if features is None:
            raise KVCompressError(
                f"layer {self.layer_idx} does not know its hidden states: method {self.policy.method!r} works only "
                "inside kvcompress.compress(...) or attach(...)"
            )
        return features

    def voters(self, queries: torch.Tensor) -> torch.Tensor | None:
        """Return the latest queries that the cluster scores stored entries with; None if it uses none."""
        window = self.policy.cluster.query_window
        return queries[:, :, -window:] if window else None

    def latest(
        self, queries: torch.Tensor, rotary: Rotary | None, padding: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the last of these queries (batch, heads, new, head_dim), as later choices need them; None if they need
        none."""
        window = self.policy.query_window
        if not window:
            return None
        recent = self.unrotated(queries[:, :, -window:], rotary)
        if padding is not None:
            # Pads of a second prompt follow stored entries and would affect their scores; NaN queries have no effect.
            pads = pad_columns(padding, queries.shape[2])[:, :, -window:]
            recent = recent.masked_fill(pads.unsqueeze(-1), torch.nan)
        return recent

    def unrotated(self, queries: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Undo the rotation of queries, if the cluster wants them unrotated."""
        if not self.policy.cluster.unrotated_queries:
            return queries
        return self._known(rotary).unrotated(queries)

    def rotary_to_move(self, rotary: Rotary | None, first: int) -> Rotary:
        """Return the rotary embedding for moving a prompt's keys; `first` is the number of tokens before the prompt."""
        if first:
            raise KVCompressError("positions='cache' moves the keys of one prompt: the cache takes no second one")
        rotary = self._known(rotary)
        return replace(rotary, cos=rotary.cos[:, :0], sin=rotary.sin[:, :0])

    def _known(self, rotary: Rotary | None) -> Rotary:
        if rotary is None:
            raise KVCompressError(
                f"layer {self.layer_idx} does not know how its queries are rotated: pass cache.rotate(...) what "
                "kvcompress.hooks.rotary.watch_rotary receives"
            )
        return rotary

    def _queries(self, candidates: Candidates) -> torch.Tensor:
        return self.unrotated(candidates.queries, candidates.view.rotary)

    def _note_of_all(self, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor | None:
        """Return `Kept.noted` for a choice that keeps every column."""
        columns = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        if view.padding is not None:
            columns = columns.masked_fill(pad_columns(view.padding, keys.shape[2]), -1)
        return self.policy.cluster.checked_note(Kept(keys, values, columns), keys, view)

    def _added(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Return what the latest queries add to each entry's sum, a block of queries at a time to save memory."""
        sums, seen = 0, view.stored.seen - queries.shape[2]
        for some in queries.split(BLOCK, dim=2):
            seen += some.shape[2]
            now = replace(view, stored=replace(view.stored, seen=seen))
            sums = sums + self.policy.cluster.observe(some, keys, now).float()
        return sums
