"""The policy: the method, its budget and the engine's options, combined."""

from dataclasses import asdict, dataclass
from functools import cached_property

from ..clusters.base import KVCluster
from ..clusters.calibrated import CalibratedKVCluster
from ..layer_budgets import LayerBudget, layer_budget
from ..methods import Method, method_info
from ..scoring.budget import Budget
from ..tokens.base import TokenMethod
from .options import PRESCRIBED, Engine, all_options
from .passages import parse_passages
from .spans import Spans

SETTLING_INTERVAL = 64  # decode steps between additions to sums that only a later prompt will ask for


@dataclass(frozen=True)
class Policy:
    """The method's `cluster`, its budget and the engine's options, with the method's defaults filled in.

    `tokens` is a method that drops tokens before they are cached; the cluster then keeps everything that reaches it.
    """

    method: str
    cluster: KVCluster
    budget: Budget
    engine: Engine
    tokens: TokenMethod | None = None

    @cached_property  # looked up once: every layer asks for options at every step
    def _cls(self) -> type[Method]:
        return method_info(self.method).cls

    def chosen(self, name: str) -> object:
        """Return one of the `PRESCRIBED` options: the user's value, otherwise the method's default."""
        given = getattr(self.engine, name)
        if given is not None:
            return given
        if type(self.cluster) is self._cls:
            return self.cluster.of_variant(name)
        # Another method scores, even if it derives from this one: its parts and variant are not this one's.
        return getattr(self._cls, name, getattr(KVCluster, name))

    @property
    def protect(self) -> Spans | None:
        """The prompt's tokens that must stay; with `passages` alone, no others."""
        if self.engine.protect is None:
            return Spans(()) if self.passages else None
        return Spans.parse(self.engine.protect)

    @property
    def passages(self) -> tuple[str, ...]:
        """Text of the first prompt that must stay."""
        return () if self.engine.protect_text is None else parse_passages(self.engine.protect_text)

    @property
    def fair(self) -> Spans | None:
        """The prompt's groups of tokens that keep equal shares, besides that of all other tokens."""
        return None if self.engine.fair is None else Spans.parse_apart(self.engine.fair)

    @property
    def head_budget(self) -> str:
        return self.chosen("head_budget")

    @property
    def layer_budget(self) -> LayerBudget:
        return self.known_layer_budget or layer_budget(self.chosen("layer_budget"))

    @property
    def known_layer_budget(self) -> LayerBudget | None:
        """The layer budget that the method's calibration file holds, if any."""
        return self.cluster.known_layer_budget if isinstance(self.cluster, CalibratedKVCluster) else None

    @property
    def decode_interval(self) -> int:
        return self.chosen("decode_interval")

    @property
    def needs_sums(self) -> bool:
        """Whether the scores are sums over all queries of a prompt."""
        return type(self.cluster).observe is not KVCluster.observe

    @property
    def sums_attention(self) -> bool:
        """Whether the scores are sums of the queries' attention weights."""
        return self.needs_sums and not self.cluster.reads_hidden

    @property
    def carries_sums(self) -> bool:
        """Whether the stored entries' sums are carried over, from chunk to chunk or from eviction to eviction."""
        return (self.decode is not None or self.engine.prefill_chunk is not None) and self.needs_sums

    @property
    def query_window(self) -> int:
        """How many of the last queries are remembered while decoding."""
        return max(self.cluster.query_window, self.settling_interval if self.carries_sums else 0)

    @property
    def settling_interval(self) -> int:
        """How many decode steps at most lie between an eviction, or another addition to the sums, and the next."""
        return SETTLING_INTERVAL if self.decode is None else self.decode_interval

    @property
    def moves_keys(self) -> bool:
        """Whether kept keys are re-rotated to their position in the cache."""
        return self.engine.positions == "cache"

    @property
    def watches_rotary(self) -> bool:
        """Whether the method or the engine needs the model's rotary embedding."""
        return self.cluster.watches_rotary or self.moves_keys

    @property
    def hooks_prompts(self) -> bool:
        """Whether a prompt's forward pass needs hooks on the model."""
        cluster = self.cluster
        is_watched = self.tokens is not None or self.watches_rotary or cluster.second_pass
        in_parts = self.engine.prefill_chunk is not None or self.engine.scope == "context-first"
        return is_watched or cluster.reads_hidden or in_parts

    @property
    def feeds_last_again(self) -> bool:
        """Whether a prompt's last token has attended to everything, and is fed again on the compressed cache."""
        return self.engine.first_token == "compressed" and self.engine.scope != "context-first"

    @property
    def hooks_steps(self) -> bool:
        """Whether a decode step's forward pass needs hooks on the model; without an eviction only where another prompt
        may follow, so not in a slot."""
        asks = self.cluster.uses_future_positions or self.cluster.reads_hidden
        return asks and (self.decode is not None or self.carries_sums)

    @property
    def options(self) -> dict[str, object]:
        """Every option of the method with its effective value, as in `all_options`."""
        given = {**asdict(self.tokens or self.cluster), **asdict(self.engine)}
        parts = {name: self.chosen(name) for name in PRESCRIBED}
        valid = all_options(method_info(self.method), self.engine.scorer)
        return {name: parts.get(name, given[name]) for name in valid if name != "preset"}

    @property
    def decode(self) -> Budget | None:
        """The budget while decoding; None if every decoded token is kept."""
        if self.engine.decode_budget is None and self.engine.decode_ratio is None:
            return None
        return Budget(self.engine.decode_ratio, self.engine.decode_budget)
