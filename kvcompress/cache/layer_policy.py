"""`LayerPolicy`: the options and budgets of one layer; no state."""

from dataclasses import dataclass, replace

from ..policy.policy import Policy
from ..scoring.budget import allocated
from ..scoring.layer_view import LayerView, Settings
from .memory import SequenceLog
from .new_tokens import NewTokens
from .protected import Protected


@dataclass(frozen=True)
class LayerPolicy:
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
            feeds_last_again=policy.feeds_last_again and engine.scope == "prompt",
            evicts_later=policy.decode is not None,
            groups=1 if policy.fair is None else 1 + len(policy.fair.parts),
        )

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

    def decode_budgets(self, lengths: list[int], log: SequenceLog) -> list[int]:
        """Return the entries per KV head that this layer keeps of rows of so many tokens while decoding."""
        return self.own_budgets([self.policy.decode(length) for length in lengths], lengths, log)

    def own_budgets(self, means: list[int], lengths: list[int], log: SequenceLog) -> list[int]:
        """Return this layer's budget for each row of `lengths` tokens, whose layers keep `means` entries on average."""
        view = LayerView(
            self.place,
            self.num_layers,
            lengths,
            means,
            1.0,
            protected_lengths=self.protected_lengths(log),
            settings=self.settings,
        )
        return self._shares(view, log.shares, log.protected)

    def protected_lengths(self, log: SequenceLog) -> tuple[int, ...]:
        """Return how many entries of this layer later evictions may not drop, for each row."""
        if log.protected is None:
            return ()
        return tuple(log.held_of_prompt() if self.policy.protect.whole_prompt else log.protected.entries)

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
