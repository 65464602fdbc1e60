"""The promises of every method: functions that raise Broken if one is not kept, NotAsked if it is not made."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from typing import Any, ClassVar
from unittest import mock

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ..cache.cache import CompressedCache
from ..cache_name import CACHE
from ..clusters.base import KVCluster
from ..errors import KVCompressError
from ..hooks.session import Session, compress
from ..measure import LargestTensor
from ..policy.make import make_policy
from ..policy.policy import Policy
from ..scoring.layer_view import LayerView
from ..scoring.returned import check_columns, checked_scores
from ..scoring.selection import ADAPTIVE
from .models import Tried, prompts, text_model, vision_model
from .reference import generate, only_attending_to

NEW = 6  # tokens per answer
TOLERANCE = 1e-4  # fp32, logits of order 1
SCORES = 1e-3  # relative, for scores: sums over a batch round differently than sums over a row
PROTECTED = 1e30  # scores from here on belong to entries that must stay
DECODING = {"decode_budget": 12, "decode_interval": 2}
RAGGED = {"head_budget": "adaptive", **DECODING}
CHUNKS = {"prefill_chunk": 16, **DECODING}
REPEATABLE = "keep no state between calls, and draw by kvcompress.scoring.layer_view.uniform_noise"


class Broken(Exception):
    """Raised if a promise is not kept; the message says what differs."""


class NotAsked(Exception):
    """Raised if the method does not make a promise; the message says why."""


@dataclass(frozen=True)
class Event:
    """One choice in one layer, for one row.

    Attributes:
        scores: (kv_heads, entries), scores of the row's entries; NaN for entries that a head does not hold.
        chosen: (kv_heads, entries), True for entries that are kept.
    """

    layer: int
    is_decoding: bool
    scores: torch.Tensor
    chosen: torch.Tensor


@dataclass
class Run:
    """An answer: its tokens (batch, new), its logits, and the scored and kept entries.

    Attributes:
        events: the choices for each row, in their order.
        history: columns seen -> the columns that every layer held then, [layer][row][kv_head].
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    events: list[list[Event]]
    history: dict[int, list]
    cache: CompressedCache


@dataclass
class Checked:
    """A method with its options, among them those that belong to a model, by its name, and the prompts."""

    ratio: ClassVar[float] = 0.3

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    of_model: dict[str, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def policy(self) -> Policy:
        return make_policy(self.method, self.ratio, **self.options)

    @property
    def cluster(self) -> KVCluster:
        return self.policy.cluster

    @cached_property
    def tried(self) -> list[Tried]:
        return [
            prompts("qwen2", text_model(), (50, 31), (0, 0), self.seed),
            prompts("qwen2-vl", vision_model(), (44, 23), (1, 0), self.seed),
        ]

    def compress(self, tried: Tried, **engine: Any) -> Session:
        given = {"max_new_tokens": NEW, "ratio": self.ratio, **self.options, **self.of_model.get(tried.name, {})}
        return compress(tried.model, self.method, **{**given, **engine})

    def refuses(self, engine: dict[str, Any]) -> str:
        """Return why these options do not go with the method and its own; an empty string if they do."""
        try:
            return make_policy(self.method, self.ratio, **{**self.options, **engine}) and ""
        except KVCompressError as error:
            return str(error)

    def named(self, tried: Tried, **engine: Any) -> str:
        """Name a batch and how it is compressed, for a message."""
        given = (f"{name}={value}" for name, value in engine.items() if value is not None)
        return ", ".join([str(tried), f"ratio {self.ratio}", *given])

    def answer(self, tried: Tried, forced: torch.Tensor | None = None, **engine: Any) -> Run:
        """Answer a batch, with the tokens `forced` if given."""
        with self.compress(tried, **engine) as session, _noted(type(self.cluster), len(tried.rows)) as events:
            history = History(session)
            criteria = StoppingCriteriaList([history])
            tokens, logits = generate(tried.model, tried.inputs, NEW, forced, stopping_criteria=criteria)
        return Run(tokens, logits, events, history.kept, session.cache)


# -- the promises


def ratio_one_is_the_full_cache(checked: Checked) -> None:
    for tried in checked.tried:
        tokens, expected = generate(tried.model, tried.inputs, NEW)
        with checked.compress(tried, ratio=1.0):
            _, logits = generate(tried.model, tried.inputs, NEW, tokens)
        same_logits(f"{tried}, ratio 1", logits, expected, "with the method", "without")


def keeps_its_budget(checked: Checked) -> None:
    policy = checked.policy
    is_even, is_adaptive = policy.chosen("layer_budget") == "uniform", policy.head_budget in ADAPTIVE
    for tried in checked.tried:
        run = checked.answer(tried)
        prompt = run.history[min(run.history)]
        for row, length in enumerate(tried.lengths):
            want, counts = policy.budget(length), [[len(head) for head in layer[row]] for layer in prompt]
            if is_even and not is_adaptive:
                is_kept = {count for heads in counts for count in heads} == {want}
            elif is_even:
                is_kept = all(sum(heads) == want * len(heads) for heads in counts)
            else:
                total = sum(map(sum, counts))
                is_kept = total == want * sum(map(len, counts)) or not policy.layer_budget.is_exact
            if not is_kept:
                raise Broken(f"{checked.named(tried)}: row {row} keeps {counts} per layer and head instead of {want}")


def decodes_as_the_full_cache_under_a_mask(checked: Checked) -> None:
    """The mask hides the dropped entries: this checks positions, masks and gathering, without merging and chunks."""
    if checked.cluster.biases_keys:
        raise NotAsked("no mask gives a key a bias")
    for tried in checked.tried:
        for eviction in (each for each in ({}, DECODING, RAGGED) if not checked.refuses(each)):
            engine = {"merge": "none", "prefill_chunk": None, **eviction}
            run = checked.answer(tried, **engine)
            with only_attending_to(tried.model, run.history):
                _, expected = generate(tried.model, tried.inputs, NEW, forced=run.tokens)
            same_logits(checked.named(tried, **engine), run.logits, expected, "compressed", "masked")


def a_row_is_as_alone(checked: Checked, **engine: Any) -> None:
    """In a padded batch, each row has the same scores and keeps the same entries as alone."""
    if refused := checked.refuses(engine):
        raise NotAsked(refused)
    for tried in checked.tried:
        batch = checked.answer(tried, **engine)
        where = checked.named(tried, **engine)
        for row, length in enumerate(tried.lengths):
            alone = checked.answer(tried.alone(row), batch.tokens[row : row + 1], **engine)
            if len(batch.events[row]) != len(alone.events[0]):
                counts = f"{len(batch.events[row])} times, alone {len(alone.events[0])}"
                raise Broken(f"{where}: row {row} chooses entries {counts}")
            for one, other in zip(batch.events[row], alone.events[0], strict=True):
                _same_scores(where, row, one, other)
                if not _same_choice(where, row, one, other):
                    break
            pads = tried.inputs["input_ids"].shape[1] - length
            if not batch.events[row] or _kept(batch, row, pads) == _kept(alone, 0, 0):  # otherwise rounding broke a tie
                same_logits(f"{where}: row {row}", batch.logits[row], alone.logits[0], "in the batch", "alone")


def a_second_turn_sees_what_was_kept(checked: Checked) -> None:
    tried = checked.tried[0].alone(0)
    ids, more = tried.inputs["input_ids"], prompts("qwen2", tried.model, (12,), (0,), checked.seed + 1)
    with checked.compress(tried):
        cache = CompressedCache(tried.model.config, checked.method, checked.ratio, **checked.options)
        tokens, _ = generate(tried.model, tried.inputs, NEW, **{CACHE: cache})
        longer = torch.cat([ids, tokens, more.inputs["input_ids"]], 1)
        second = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
        _, logits = generate(tried.model, second, NEW, **{CACHE: cache})
    if not bool(logits.isfinite().all()):
        raise Broken(f"{tried}, then 12 more: logits are not finite")
    for layer, heads in enumerate(cache.kept_indices(layer)[0] for layer in range(len(cache.layers))):
        for head, columns in enumerate(heads):
            if columns.tolist() != sorted(set(columns.tolist())):
                raise Broken(f"{tried}, then 12 more: layer {layer}, KV head {head} holds columns {columns.tolist()}")


def chooses_the_same_twice(checked: Checked) -> None:
    tried = checked.tried[0]
    first, second = (checked.answer(tried) for _ in range(2))
    for row in range(len(tried.lengths)):
        if _kept(first, row, 0) != _kept(second, row, 0):
            raise Broken(f"{checked.named(tried)}: row {row} keeps other entries when run again: {REPEATABLE}")


def a_head_is_scored_by_itself(checked: Checked) -> None:
    """A KV head's scores stay the same if the other heads have random states.

    Otherwise they would be wrong where heads are scored apart: under tensor parallelism, and with ragged heads."""
    cls = type(checked.cluster)
    if cls.mixes_heads:
        raise NotAsked(f"{cls.__name__}.mixes_heads is True")
    if cls.score is KVCluster.score:
        raise NotAsked(f"{cls.__name__} defines no score")
    draw = torch.Generator().manual_seed(checked.seed)

    def compared(score: Callable, cluster: KVCluster, *given: Any) -> torch.Tensor:
        (*states, view), place = given, f"{cls.__name__}.score"
        keys = states[1]
        scores, again = (checked_scores(score(cluster, *given), place, keys) for _ in range(2))
        if not torch.allclose(scores, again, rtol=SCORES, atol=SCORES, equal_nan=True):
            raise Broken(f"{tried}: {place} returns other scores for the same states when called again: {REPEATABLE}")
        for head in range(keys.shape[1]):
            others = [_with_other_heads(each, head, keys.shape[1], draw) for each in states]
            if cluster.reads_hidden:  # what it computed from all heads
                others[0] = states[0]
            apart = checked_scores(score(cluster, *others, view), place, keys)
            is_near = torch.isclose(scores[0, head], apart[0, head], rtol=SCORES, atol=SCORES, equal_nan=True)
            if not bool(is_near.all()):
                column = int((~is_near).nonzero()[0])
                raise Broken(
                    f"{checked.named(tried)}: layer {view.place}, KV head {head}: entry {column} scores "
                    f"{scores[0, head, column]:.4g}, and {apart[0, head, column]:.4g} if the other heads have other "
                    "states: set mixes_heads = True"
                )
        return scores

    for tried in (each.alone(0) for each in checked.tried):
        with checked.compress(tried), _scoring_by(cls, compared):
            generate(tried.model, tried.inputs, 1)


def takes_sixteen_bits(checked: Checked) -> None:
    for tried in checked.tried:
        half = replace(tried, model=copy.deepcopy(tried.model).bfloat16())
        with checked.compress(half):
            _, logits = generate(half.model, half.inputs, 2)
        if not bool(logits.isfinite().all()):
            raise Broken(f"{tried}, bfloat16, ratio {checked.ratio}: logits are not finite")


def memory_is_linear_in_the_prompt(checked: Checked) -> None:
    """Scoring creates no tensor of queries x keys."""
    model, largest = checked.tried[0].model, []
    for length in (1500, 3000):
        tried, mode = prompts("qwen2", model, (length,), (0,), checked.seed), LargestTensor()

        def watched(score: Callable, *given: Any, mode: LargestTensor = mode) -> torch.Tensor:
            with mode:
                return score(*given)

        with checked.compress(tried), _scoring_by(type(checked.cluster), watched):
            generate(model, tried.inputs, 1)
        largest.append(mode.numel)
    states = length * model.config.hidden_size  # tensors up to the size of the queries may come from blocks
    if largest[1] > max(2.1 * largest[0], states):
        raise Broken(f"qwen2, 1500 and 3000 tokens: scoring creates a tensor of {largest[0]} and {largest[1]} numbers")


PROMISES: dict[str, Callable[[Checked], None]] = {
    "ratio 1 gives the logits of the full cache": ratio_one_is_the_full_cache,
    "each row keeps its budget": keeps_its_budget,
    "decoding equals the full cache under a mask": decodes_as_the_full_cache_under_a_mask,
    "a row gives the same result in a padded batch as alone": a_row_is_as_alone,
    "a row gives the same result in a batch as alone while decoding evicts": partial(a_row_is_as_alone, **DECODING),
    "a row gives the same result in a batch as alone with ragged heads": partial(a_row_is_as_alone, **RAGGED),
    "a row gives the same result in a batch as alone in chunks": partial(a_row_is_as_alone, **CHUNKS),
    "a second prompt sees the kept entries": a_second_turn_sees_what_was_kept,
    "the same prompt keeps the same entries": chooses_the_same_twice,
    "a KV head's scores depend on no other head": a_head_is_scored_by_itself,
    "a model in bfloat16 is compressed": takes_sixteen_bits,
    "memory is linear in the prompt": memory_is_linear_in_the_prompt,
}


# -- helpers of the checks


def _same_scores(where: str, row: int, one: Event, other: Event) -> None:
    columns = other.scores.shape[1]
    together, alone = one.scores[:, -columns:], other.scores
    if together.shape != alone.shape:
        raise Broken(f"{where}: row {row}, layer {one.layer} scores {one.scores.shape[1]} entries, alone {columns}")
    is_near = torch.isclose(together, alone, rtol=SCORES, atol=SCORES, equal_nan=True)
    if not bool(is_near.all()):
        head, column = (~is_near).nonzero()[0].tolist()
        when = ", while decoding" * one.is_decoding
        raise Broken(
            f"{where}: row {row}, layer {one.layer}, KV head {head}{when}: entry {column} of {columns} scores "
            f"{together[head, column]:.4g} in the batch, {alone[head, column]:.4g} alone"
        )


def _same_choice(where: str, row: int, one: Event, other: Event) -> bool:
    """Return whether the same entries were chosen. If rounding broke a tie, the row holds others from then on."""
    together, alone = one.chosen[:, -other.chosen.shape[1] :], other.chosen
    if torch.equal(together, alone):
        return True
    if bool(((together | alone) & other.scores.isnan()).any()):
        raise Broken(f"{where}: row {row}, layer {one.layer} keeps places that hold no entry: see view.padding")
    worth = other.scores.masked_fill(other.scores.abs() >= PROTECTED, 0)
    sums = [worth.masked_fill(~chosen, 0).sum() for chosen in (together, alone)]
    if not torch.isclose(*sums, rtol=SCORES, atol=SCORES):
        raise Broken(
            f"{where}: row {row}, layer {one.layer} has the same scores, but its choice sums to {sums[0]:.4g} in the "
            f"batch, {sums[1]:.4g} alone"
        )
    return False


def same_logits(where: str, one: torch.Tensor, other: torch.Tensor, name: str, other_name: str) -> None:
    if not bool(torch.isclose(one, other, atol=TOLERANCE, rtol=0).all()):
        apart = (one - other).abs().nan_to_num(float("inf")).max()
        raise Broken(f"{where}: logits {name} differ from those {other_name} by up to {apart:.3g}")


def _kept(run: Run, row: int, pads: int) -> list:
    return [[[(head - pads).tolist() for head in layer[row]] for layer in held] for held in run.history.values()]


@contextmanager
def _noted(cls: type[KVCluster], rows: int) -> Iterator[list[list[Event]]]:
    """Record the scores that `select` gets while a model runs, for each row in which it has to choose."""
    events: list[list[Event]] = [[] for _ in range(rows)]
    select = cls.select

    @wraps(select)
    def noted(self: KVCluster, scores: torch.Tensor, view: LayerView) -> torch.Tensor:
        kept = select(self, scores, view)
        check_columns(kept, f"{cls.__name__}.select", scores, view)
        chosen = torch.zeros_like(scores[..., :1], dtype=torch.bool).repeat(1, 1, scores.shape[-1] + 1)
        chosen = chosen.scatter(2, kept + 1, True)[..., 1:]  # -1 means no entry
        hidden = ~view.real_columns(scores).expand(-1, scores.shape[1], -1)
        for row, of_row in enumerate(scores.masked_fill(hidden, torch.nan)):
            if view.budgets[row] < view.lengths[row]:  # otherwise only another row of the batch has to choose
                is_own = ~hidden[row].all(0)
                events[row].append(Event(view.place, view.is_decoding, of_row[:, is_own], chosen[row][:, is_own]))
        return kept

    with mock.patch.object(cls, "select", noted):
        yield events


@contextmanager
def _scoring_by(cls: type[KVCluster], asked: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let `asked`, given the class's `score` and its arguments, return the scores."""
    score = cls.score

    @wraps(score)
    def asking(*given: Any) -> torch.Tensor:
        return asked(score, *given)

    with mock.patch.object(cls, "score", asking):
        yield


def _with_other_heads(
    states: torch.Tensor | None, head: int, kv_heads: int, draw: torch.Generator
) -> torch.Tensor | None:
    """Return the states (batch, heads, ...) of one KV head and its query heads, with random ones of the others."""
    if states is None:
        return None
    groups = states.shape[1] // kv_heads
    own = slice(head * groups, (head + 1) * groups)
    other = torch.randn(states.shape, generator=draw).to(states)
    other[:, own] = states[:, own]
    return other


class History(StoppingCriteria):
    """Records, for each number of columns seen, the columns that every layer held then."""

    def __init__(self, session: Session):
        self.session, self.kept = session, {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        cache = self.session.cache
        self.kept[cache.seen_tokens] = [cache.kept_indices(layer) for layer in range(len(cache.layers))]
        return torch.zeros(len(input_ids), dtype=torch.bool)
