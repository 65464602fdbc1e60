"""The policy at one layer: how much is kept, what a cluster is shown, and what it keeps. Holds no state."""

from dataclasses import dataclass, replace

import torch

from ..clusters.base import KVCluster
from ..device import on_device
from ..errors import KVCompressError
from ..policy.policy import Policy
from ..scoring.budget import allocate
from ..scoring.layer_view import Kept, LayerView, Settings, StoredEntries
from ..scoring.rotary import Rotary
from ..scoring.rows import scores_of
from ..scoring.selection import ADAPTIVE
from ..scoring.windows import pad_columns
from .new_tokens import NewTokens
from .scope import Candidates, States, context_of, evictable, fills_all_slots, with_budgets


@dataclass(frozen=True)
class Choice:
    """Attributes:
    layer_idx: the model's, for messages.
    place: among the `num_layers` layers that are compressed.
    """

    policy: Policy
    layer_idx: int
    place: int
    num_layers: int

    # -- a prompt

    def budgets(self, tokens: NewTokens) -> list[int]:
        """Entries to keep of each row's context, per KV head."""
        policy = self.policy
        if policy.tokens is not None:
            return tokens.context
        if policy.engine.ratio_of == "prompt":
            return [policy.budget(length) if length else 0 for length in tokens.context]
        return [
            length - images + (policy.budget(images) if images else 0)
            for length, images in zip(tokens.context, tokens.vision_lengths, strict=True)
        ]

    def view(
        self, tokens: NewTokens, budgets: list[int], states: States, merge_threshold: torch.Tensor | None
    ) -> LayerView:
        """What a cluster may know of a prompt."""
        device = states.keys.device
        vision = None if tokens.vision is None else tokens.vision.to(device)
        text = None
        if self.policy.engine.ratio_of == "vision":
            text = tuple(n - images for n, images in zip(tokens.context, tokens.vision_lengths, strict=True))
        return LayerView(
            self.place,
            self.num_layers,
            tokens.lengths,
            budgets,
            states.scaling,
            padding=None if tokens.padding is None else tokens.padding.to(device),
            vision=vision,
            frame_tokens=tokens.frame_tokens,
            protected=None if text is None else ~vision,
            protected_lengths=text or (),
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
        )

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView) -> torch.Tensor | None:
        """The sums of a prompt's queries, where they are carried on."""
        return self.policy.cluster.observe(queries, keys, view) if self.policy.carries_sums else None

    def candidates(self, states: States, view: LayerView, context: list[int], sums: torch.Tensor | None) -> Candidates:
        """What of a prompt is chosen among; `sums`: of all its queries."""
        if context == view.lengths:
            return Candidates(states.queries, states.keys, states.values, replace(view, sums=sums))
        part = context_of(states, view, context)
        part.sums = sums
        if max(context):
            part.view = replace(part.view, sums=self.observe(part.queries, part.keys, part.view))
        return part

    def of_whole(
        self, states: States, view: LayerView, context: list[int], sums: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What a prompt that is kept whole leaves for later choices, as one that is cut does: sums and `Kept.noted`."""
        if self.policy.decode is None or not max(context):
            return sums, None
        cluster, part = self.policy.cluster, self.candidates(states, view, context, sums)
        if sums is not None:  # those of a context are of the whole prompt's queries
            is_whole = [of_row == length for of_row, length in zip(context, view.lengths, strict=True)]
            is_whole = on_device(is_whole, sums.device)[:, None, None]
            sums = torch.where(is_whole, cluster.carried(sums, view), sums)
        return sums, self._note_of_all(part.keys, part.values, part.view)

    @property
    def waits(self) -> bool:
        """Whether the choice needs all layers, or a second reading of the prompt."""
        return self.policy.layer_budget.is_measured or self.policy.cluster.second_pass

    def keep(self, candidates: Candidates) -> Kept:
        """What lives on of a prompt."""
        shares = self.policy.layer_budget.budgets(evictable(candidates.view))
        view = with_budgets(candidates.view, shares[self.place])
        kept = self.policy.cluster.update_kv(self._queries(candidates), candidates.keys, candidates.values, view)
        return self._counted(candidates, kept, view)

    def assess(self, candidates: Candidates) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scores of a prompt that waits, and what the rule for layer budgets wants to know of it."""
        rule, view = self.policy.layer_budget, candidates.view
        scores = scores_of(
            self.policy.cluster.score, self._queries(candidates), candidates.keys, candidates.values, view
        )
        measured = None
        if rule.is_measured:
            measured = rule.measure(candidates.queries, candidates.keys, candidates.values, scores, view)
        return scores, measured

    def keep_scored(self, candidates: Candidates, scores: torch.Tensor, budgets: list[int]) -> Kept:
        """As `keep`, of a prompt that waited. `budgets`: of each row, for what is evictable."""
        view = with_budgets(candidates.view, budgets)
        kept = self.policy.cluster.keep(scores, candidates.keys, candidates.values, view)
        return self._counted(candidates, kept, view)

    def _counted(self, candidates: Candidates, kept: Kept, view: LayerView) -> Kept:
        """`kept` in the prompt's columns, with `Kept.total` where the budgets under `view` say it."""
        kept = candidates.in_prompt(kept)
        if candidates.question is not None:
            return kept
        if fills_all_slots(view):
            return replace(kept, total=kept.indices.numel())
        held = [[length] * kept.indices.shape[1] for length in view.lengths]
        return replace(kept, total=self._total(view.budgets, held))

    def _total(self, budgets: list[float], held: list[list[int]]) -> int | None:
        """What is kept of `held` entries, [row][head], by rows of these budgets; None for a method that chooses in its
        own way, which may keep less."""
        if self._chooses_in_its_own_way:
            return None
        if self.policy.head_budget in ADAPTIVE:
            return sum(min(round(budget * len(row)), sum(row)) for budget, row in zip(budgets, held, strict=True))
        return sum(map(sum, self._left(budgets, held)))

    def _left(self, budgets: list[float], held: list[list[int]]) -> list[list[int]] | None:
        """As `_total`, of each head, where heads of a row share their budget evenly."""
        if self._chooses_in_its_own_way or self.policy.head_budget in ADAPTIVE:
            return None
        return [[min(budget, of_head) for of_head in row] for budget, row in zip(budgets, held, strict=True)]

    @property
    def _chooses_in_its_own_way(self) -> bool:
        own = type(self.policy.cluster)
        return any(getattr(own, name) is not getattr(KVCluster, name) for name in ("update_kv", "keep", "select"))

    # -- what is stored, while decoding or together with a later chunk

    def stored_view(
        self,
        kept: Kept,
        seen: int,
        lengths: list[int],
        budgets: list[int],
        row_seeds: tuple[int, ...],
        scaling: float,
        module: torch.nn.Module,
        rotary: Rotary | None,
        merge_threshold: torch.Tensor | None,
        noted: torch.Tensor | None,
        reading: bool = False,
        has_no_pads: bool = False,
        held: list[list[int]] | None = None,
        **vision: object,
    ) -> LayerView:
        """What a cluster may know of stored entries.

        Args:
            has_no_pads, held: as in `Memory`.
            lengths: of each row the tokens so far, evicted ones included.
            budgets: entries to keep of them in the mean over the layers.
            reading: as in `StoredEntries`.
            vision: what is known of vision tokens, as fields of `LayerView`.
        """
        padding = None
        if held is not None:
            padding = on_device(kept.indices.shape[2] - torch.tensor(held), kept.indices.device)
        elif not has_no_pads:
            padding = (kept.indices < 0).sum(-1)
        return LayerView(
            self.place,
            self.num_layers,
            lengths,
            budgets,
            scaling,
            padding=padding,
            row_seeds=row_seeds,
            module=module,
            rotary=rotary,
            settings=self.settings,
            stored=StoredEntries(kept.indices, seen, tuple(lengths), reading),
            merge_threshold=merge_threshold,
            noted=noted,
            **vision,
        )

    def reduce(
        self,
        kept: Kept,
        queries: torch.Tensor | None,
        new: torch.Tensor | None,
        view: LayerView,
        shares: list[list[int]] | None,
        held: list[list[int]] | None = None,
    ) -> Kept:
        """What stays of entries that were stored and of newer ones.

        Args:
            kept: all of them.
            queries: what the cluster scores with.
            new: the latest queries, which no sum has seen.
            view: of `kept`, see `stored_view`.
            shares: what the layers kept of the latest prompt, [layer][row], where that was measured.
            held: as in `Memory`; where the host does not know it, pads are counted, which waits for the device.

        Returns:
            What the cluster keeps; where that is everything, the entries of `kept` with their new sums and, of a chunk,
            its note.
        """
        rows, kv_heads, slots = kept.indices.shape
        if view.padding is None:
            held = [[slots] * kv_heads] * rows
        elif held is None:
            held = (slots - view.padding).tolist()
        entries = [max(of_heads) for of_heads in held]
        if self.policy.carries_sums:
            view = replace(view, sums=kept.sums + self._added(new, kept.keys, view))
            kept = replace(kept, sums=view.sums)
        # Layers share a row's budget out by its tokens, which are the same for all, not by what each happens to hold.
        budgets = [min(share, held) for share, held in zip(self._shares(view, shares), entries, strict=True)]
        view = replace(view, lengths=entries, budgets=budgets, mean_budgets=tuple(view.budgets))
        if budgets == entries:
            if view.stored.reading:  # what decoding will know of the prompt, whether or not its last chunk evicts
                kept = replace(kept, noted=self._note_of_all(kept.keys, kept.values, view))
            kept = replace(kept, total=kept.indices.numel() if view.padding is None else None, held=held)
            return kept if kept.sums is None else replace(kept, sums=self.policy.cluster.carried(kept.sums, view))
        result = self.policy.cluster.update_kv(queries, kept.keys, kept.values, view)
        if fills_all_slots(view):
            return replace(result, indices=kept.indices.gather(2, result.indices), total=result.indices.numel())
        columns = kept.indices.gather(2, result.indices.clamp(min=0)).masked_fill_(result.indices < 0, -1)
        return replace(result, indices=columns, total=self._total(budgets, held), held=self._left(budgets, held))

    def decode_budget(self, length: int, shares: list[list[int]] | None) -> int:
        """Entries per KV head that this layer keeps of a sequence of `length` tokens while decoding; `shares` as in
        `reduce`."""
        view = LayerView(
            self.place, self.num_layers, [length], [self.policy.decode(length)], 1.0, settings=self.settings
        )
        return self._shares(view, shares)[0]

    def foretold(self, foretold: torch.Tensor | None) -> torch.Tensor:
        """What a pass's hidden states foretell, for a method that reads them."""
        if foretold is None:
            raise KVCompressError(
                f"layer {self.layer_idx} does not know its hidden states: method {self.policy.method!r} works inside "
                "kvcompress.compress(...) or attach(...) alone"
            )
        return foretold

    def voters(self, queries: torch.Tensor) -> torch.Tensor | None:
        """Those of the latest queries that the cluster scores stored entries with; None where it wants none."""
        window = self.policy.cluster.query_window
        return queries[:, :, -window:] if window else None

    def latest(
        self, queries: torch.Tensor, rotary: Rotary | None, padding: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The last of these queries (batch, heads, new, head_dim), as many as later choices score with and as the
        cluster wants them; None where it wants none."""
        window = self.policy.query_window
        if not window:
            return None
        recent = self.unrotated(queries[:, :, -window:], rotary)
        if padding is not None:
            # The pads of a second prompt stand behind stored entries, which they would vote for: NaN has no vote.
            pads = pad_columns(padding, queries.shape[2])[:, :, -window:]
            recent = recent.masked_fill(pads.unsqueeze(-1), torch.nan)
        return recent

    def unrotated(self, queries: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Queries as the cluster wants them: rotated, or not."""
        if not self.policy.cluster.unrotated_queries:
            return queries
        return self._known(rotary).unrotated(queries)

    def rotary_to_move(self, rotary: Rotary | None, first: int) -> Rotary:
        """What moving a prompt's keys needs to know; `first`: tokens before it."""
        if first:
            raise KVCompressError("keys are moved to their place in the cache in one prompt: it takes no second one")
        rotary = self._known(rotary)
        return replace(rotary, cos=rotary.cos[:, :0], sin=rotary.sin[:, :0])

    def _known(self, rotary: Rotary | None) -> Rotary:
        if rotary is None:
            raise KVCompressError(
                f"layer {self.layer_idx} does not know how its queries are rotated: give cache.rotate(...) what "
                "kvcompress.hooks.rotary.watch_rotary receives"
            )
        return rotary

    def _queries(self, candidates: Candidates) -> torch.Tensor:
        return self.unrotated(candidates.queries, candidates.view.rotary)

    def _note_of_all(self, keys: torch.Tensor, values: torch.Tensor, view: LayerView) -> torch.Tensor | None:
        """`Kept.noted` of a choice that keeps every column."""
        columns = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        if view.padding is not None:
            columns = columns.masked_fill(pad_columns(view.padding, keys.shape[2]), -1)
        return self.policy.cluster.note(Kept(keys, values, columns), keys, view)

    def _added(self, queries: torch.Tensor, keys: torch.Tensor, view: LayerView, block: int = 128) -> torch.Tensor:
        """What the latest queries add to each entry, a block of them at a time, so that memory is `block` rows."""
        sums = torch.zeros(keys.shape[:3], device=keys.device)
        for start in range(0, queries.shape[2], block):
            some = queries[:, :, start : start + block]
            seen = view.stored.seen - queries.shape[2] + start + some.shape[2]
            sums += self.policy.cluster.observe(some, keys, replace(view, stored=replace(view.stored, seen=seen)))
        return sums

    def _shares(self, view: LayerView, shares: list[list[int]] | None) -> list[int]:
        """This layer's budget of each row. Shares that were measured in the prompt stay as they were."""
        if shares is None:
            rule = self.policy.layer_budget
            return view.budgets if rule.is_measured else rule.budgets(view)[self.place]
        return [
            allocate([layer[row] for layer in shares], budget * self.num_layers, length)[self.place]
            for row, (budget, length) in enumerate(zip(view.budgets, view.lengths, strict=True))
        ]
