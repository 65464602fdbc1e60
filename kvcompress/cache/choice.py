"""`Choice`: applies the policy to one layer. It sets budgets, builds a cluster's view and calls the cluster; no
state."""

from dataclasses import dataclass, replace

import torch

from ..clusters.base import KVCluster
from ..device import on_device
from ..errors import KVCompressError
from ..policy.policy import Policy
from ..scoring.budget import allocated
from ..scoring.layer_view import Kept, LayerView, Settings, StoredEntries, all_slots
from ..scoring.returned import check_kept, check_measured, checked_rows, unchanged
from ..scoring.rotary import Rotary
from ..scoring.rows import scores_of
from ..scoring.selection import ADAPTIVE
from ..scoring.windows import BLOCK, pad_columns
from .memory import Memory, SequenceLog
from .new_tokens import NewTokens
from .protected import Protected
from .scope import Candidates, States, context_of, evictable, fills_all_slots, with_budgets


@dataclass(frozen=True)
class Choice:
    """One layer's policy.

    Attributes:
        policy: the policy of all layers.
        layer_idx: the model's index of the layer, for messages.
        place: index of the layer among the `num_layers` compressed layers.
    """

    policy: Policy
    layer_idx: int
    place: int
    num_layers: int

    # -- a prompt

    def budgets(self, tokens: NewTokens) -> list[int]:
        """Return the entries to keep of each row's context, per KV head."""
        budget = self.policy.budget
        if self.policy.tokens is not None:
            return tokens.context
        if self.policy.engine.ratio_of == "prompt":
            # A piece of a prompt may be mostly protected; the prompt's own budget was checked (protected.py).
            least = tokens.protected_lengths or [0] * len(tokens.context)
            return [max(budget(length), some) for length, some in zip(tokens.context, least, strict=True)]
        counts = zip(tokens.context, tokens.vision_lengths, strict=True)
        return [length - images + budget(images) for length, images in counts]

    def view(
        self, tokens: NewTokens, budgets: list[int], states: States, merge_threshold: torch.Tensor | None
    ) -> LayerView:
        """Return a cluster's view of a prompt."""
        device = states.keys.device
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
            merge_threshold=merge_threshold,
        )

    @property
    def settings(self) -> Settings:
        policy, engine = self.policy, self.policy.engine
        return Settings(
            cluster=policy.cluster,
            query_window=policy.cluster.query_window,
            head_budget=policy.head_budget,
            safeguard=policy.chosen("safeguard"),
            pyramid_beta=engine.pyramid_beta,
            merge=policy.chosen("merge"),
            merge_modality=engine.merge_modality,
            moves_keys=policy.moves_keys,
            evicts_later=policy.decode is not None,
            groups=1 if policy.fair is None else 1 + len(policy.fair.parts),
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

        None for a method that overrides the selection, which may keep fewer."""
        if self._overrides_selection:
            return None
        if self.policy.head_budget in ADAPTIVE:
            return [min(round(budget * len(row)), sum(row)) for budget, row in zip(budgets, held, strict=True)]
        return [sum(row) for row in self._left(budgets, held)]

    def _left(self, budgets: list[float], held: list[list[int]]) -> list[list[int]] | None:
        """Like `_totals`, for each head; None for adaptive heads."""
        if self._overrides_selection or self.policy.head_budget in ADAPTIVE:
            return None
        return [[min(budget, of_head) for of_head in row] for budget, row in zip(budgets, held, strict=True)]

    def _fills_all_slots(self, view: LayerView) -> bool:
        return fills_all_slots(view) and (self.policy.cluster.fills_budget or not self._overrides_selection)

    @property
    def _overrides_selection(self) -> bool:
        own = type(self.policy.cluster)
        return any(getattr(own, name) is not getattr(KVCluster, name) for name in ("update_kv", "keep", "select"))

    # -- stored entries, while decoding or with a later chunk

    def reduce(
        self,
        kept: Kept,
        memory: Memory,
        seen: int,
        budgets: list[int],
        states: States,
        has_no_pads: bool = False,
        reading: bool = False,
        stays: list[bool] | None = None,
        **vision: object,
    ) -> Kept:
        """Choose among stored and newer entries.

        Args:
            kept: all of the entries, with `Kept.held` if it is known.
            memory: what lasted since earlier choices.
            seen: columns of the sequence so far.
            budgets: entries to keep, as a mean over the layers.
            states: with all remembered queries, or a chunk's.
            has_no_pads: as in `Memory`; if it is False and `Kept.held` unknown, pads are counted, which waits for the
                device.
            reading: as in `StoredEntries`.
            stays: the rows that keep everything, whatever their budget.
            vision: fields of `LayerView` about vision tokens.

        Returns:
            The entries that the cluster keeps. If it keeps everything, these are the entries of `kept` with their new
                sums and, in a later chunk, `Kept.noted`.
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
            self.place,
            self.num_layers,
            lengths,
            budgets,
            states.scaling,
            padding=padding,
            row_seeds=log.row_seeds,
            module=states.module,
            rotary=states.rotary,
            settings=self.settings,
            stored=StoredEntries(kept.indices, seen, tuple(lengths), reading),
            merge_threshold=memory.merge_threshold,
            noted=None if reading else memory.noted,
            protected=log.protected and log.protected.among(kept.indices),
            protected_lengths=self.protected_lengths(log),
            **vision,
        )
        entries = [max(of_heads) for of_heads in held]
        if self.policy.carries_sums:
            new = states.queries if reading else states.queries[:, :, -memory.decoded :]
            view = replace(view, sums=kept.sums + self._added(new, kept.keys, view))
            kept = replace(kept, sums=view.sums)
        # Layers share a row's budget by its tokens, which are the same for all, not by the entries that each holds.
        own = self._shares(view, log.shares, log.protected)
        budgets = [
            most if all_stay else min(share, most)
            for share, most, all_stay in zip(own, entries, stays or [False] * rows, strict=True)
        ]
        view = replace(view, lengths=entries, budgets=budgets, mean_budgets=tuple(view.budgets))
        if budgets == entries:
            return self._all_of(replace(kept, held=held), view)
        voters = states.queries
        if voters is not None and not (reading and self.policy.cluster.unrotated_queries):
            voters = self.voters(voters)  # of a chunk, statistics of unrotated queries are of all, as in a first chunk
        result = self._chosen(voters, kept.keys, kept.values, view)
        if self._fills_all_slots(view):
            return replace(result, indices=kept.indices.gather(2, result.indices), totals=all_slots(result.indices))
        columns = kept.indices.gather(2, result.indices.clamp(min=0)).masked_fill_(result.indices < 0, -1)
        return replace(result, indices=columns, totals=self._totals(budgets, held), held=self._left(budgets, held))

    def _all_of(self, kept: Kept, view: LayerView) -> Kept:
        """Return the result of a choice among stored entries that keeps all of them."""
        if view.stored.reading:  # for decoding, even if the last chunk evicts nothing
            kept = replace(kept, noted=self._note_of_all(kept.keys, kept.values, view))
        sums = None if kept.sums is None else self.policy.cluster.carried(kept.sums, view)
        return replace(kept, sums=sums, totals=all_slots(kept.indices) if view.padding is None else None)

    def decode_budget(self, length: int, log: SequenceLog) -> int:
        """Return the entries per KV head that this layer keeps of `length` tokens while decoding, after the one row's
        prompt in `log`."""
        budget = self.policy.decode(length)
        protected = self.protected_lengths(log)
        view = LayerView(
            self.place, self.num_layers, [length], [budget], 1.0, protected_lengths=protected, settings=self.settings
        )
        return self._shares(view, log.shares, log.protected)[0]

    def protected_lengths(self, log: SequenceLog) -> tuple[int, ...]:
        """Return how many entries of this layer later evictions may not drop, for each row."""
        if log.protected is None:
            return ()
        return tuple(log.held_of_prompt() if self.policy.protect.whole_prompt else log.protected.entries)

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

    def _shares(self, view: LayerView, shares: list[list[int]] | None, protected: Protected | None = None) -> list[int]:
        """Return this layer's budget for each row. Shares measured in the prompt stay the same.

        Of protected entries each layer keeps its own, and the layers share the rest of the budget."""
        if protected is not None:
            is_uniform = self.policy.chosen("layer_budget") == "uniform" and shares is None
            means = view.protected_lengths if is_uniform else protected.entries
            lengths = [n - some for n, some in zip(view.lengths, protected.tokens, strict=True)]
            parts = zip(view.budgets, means, lengths, strict=True)
            rest = replace(view, lengths=lengths, budgets=[min(n - some, most) for n, some, most in parts])
            return [a + b for a, b in zip(view.protected_lengths, self._shares(rest, shares), strict=True)]
        if shares is None:
            rule = self.policy.layer_budget
            return view.budgets if rule.is_measured else rule.budgets(view)[self.place]
        return [
            allocated(tuple(layer[row] for layer in shares), budget * self.num_layers, length)[self.place]
            for row, (budget, length) in enumerate(zip(view.budgets, view.lengths, strict=True))
        ]
