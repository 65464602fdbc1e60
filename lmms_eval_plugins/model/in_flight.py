"""Requests in flight: each has its own prefill, all decode together, and when one finishes the next takes its slot.

Like batches, they are measured as if nothing were reused from another cell.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, count

from transformers import BatchFeature

import kvcompress
from kvcompress.cache.cache import CompressedCache
from kvcompress.device import peak_memory, reset_peak_memory, synchronise
from kvcompress.hooks.shared_prompt import SharedPrompt
from kvcompress.inflight.loop import Limits
from kvcompress.inflight.request import Answer
from kvcompress.measure import Measurement
from kvcompress.scoring.vision import vision_token_mask

from .answering import Answering, Answers, with_few_tokens
from .batches import Batch
from .generation import Generation
from .kept_tokens import KeptSets
from .prompts import on_device
from .vision_tower import VisionTower


@dataclass(frozen=True)
class FlightRequest:
    """A request to answer: its place among the caller's, a batch of one, how to generate, and whether to record what
    each layer stores."""

    place: int
    batch: Batch
    wanted: Generation
    record_kept: bool = False


@dataclass
class RunningRequest:
    """A request in a slot, with the measurements of its prefill.

    Attributes:
        inputs: the model inputs, on the model's device.
        vision_tokens: the number of vision tokens in the prompt.
        saved_before_s: seconds the run had saved before this request by reusing vision features and prefills.
        reused_tokens: how many prompt tokens came from a prefix cache; None without one.
        saved_s: seconds the run had saved up to the end of this request's prefill.
        kept: what each layer stores, if that is recorded.
    """

    request: FlightRequest
    inputs: BatchFeature
    vision_tokens: int
    tower: VisionTower
    prompt: SharedPrompt
    saved_before_s: float
    reused_tokens: int | None = None
    saved_s: float = 0.0
    kept: KeptSets | None = None

    @property
    def correction_s(self) -> float:
        """Seconds to add to the measured prefill to get that of one that reuses nothing."""
        return self.tower.correction_s + self.prompt.correction_s


class Flight:
    """Answers requests in flight under the current compression: an iterable of (request, its answers), in the order in
    which they finish. Close its iterator: `contextlib.closing(iter(flight))`."""

    def __init__(self, answering: Answering, requests: Iterable[FlightRequest], limits: Limits, keeps: bool = True):
        """`requests` is consumed as slots become free. `keeps`: whether what is computed may be reused."""
        self._answering, self._model = answering, answering.model
        self._waiting, self._limits = requests, limits
        self._keeps = keeps
        self._prefixes = answering.prefixes if keeps else None  # a warm-up is one with none
        self._shares_prompts = keeps and answering.has_cells and answering.prefixes is None
        self._tower, self._prompt = VisionTower(self._model, {}), SharedPrompt(self._model, room=0)
        self._is_spared = False  # whether any prefill was reused instead of run
        self._running: dict[int, RunningRequest] = {}
        self._clock = answering.clock
        self._spent_s = 0.0  # of the run so far
        self._saved_s = 0.0  # so far by reusing vision features and prefills
        self._counted_s = 0.0  # attributed to answers so far

    def __iter__(self) -> Iterator[tuple[FlightRequest, Answers]]:
        waiting = iter(self._waiting)
        first = next(waiting, None)
        if first is None:
            return
        if not self._answering.is_warm:
            self._warm_up(first)
        room = first.wanted.arguments["max_new_tokens"]
        reset_peak_memory(self._model.device)
        with (
            self._tower,
            self._answering.session(room, self._prefixes) as session,
            closing(self._requests(chain([first], waiting))) as requests,
        ):
            self._flight = session.generate_many(requests, **vars(self._limits), after_prompt=self._after_prompt)
            self._flight.clock = self._clock
            while (answer := self._next()) is not None:
                if answer.error is not None:
                    raise answer.error
                each = self._running.pop(answer.index)
                answers = self._answers(answer, each)
                with self._clock.stopped():
                    yield each.request, answers

    def _warm_up(self, first: FlightRequest) -> None:
        """Answer a request with a few tokens, without counting it."""
        wanted = replace(first.wanted, arguments=with_few_tokens(first.wanted.arguments))
        self._answering.is_warm = True
        for _ in Flight(self._answering, [FlightRequest(0, first.batch, wanted)], self._limits, keeps=False):
            pass

    def _next(self) -> Answer | None:
        start = self._clock()
        answer = next(self._flight, None)
        self._spent_s += self._clock() - start
        return answer

    def _requests(self, waiting: Iterator[FlightRequest]) -> Iterator[kvcompress.Request]:
        for index in count():
            with self._clock.stopped():
                if (each := next(waiting, None)) is None:
                    return
                inputs = on_device(each.batch.inputs, self._model.device)
                self._begin(index, each, inputs)
            with self._prompt:
                yield kvcompress.Request(dict(inputs), each.wanted.arguments, each.wanted.seed)

    def _begin(self, index: int, request: FlightRequest, inputs: BatchFeature) -> None:
        """Set up the prefill of the next request."""
        answering, batch = self._answering, request.batch
        self._tower.held = answering.held
        self._forget()
        if not self._flight.halved:
            self._tower.begin(answering.known_of_tower(batch))
        if self._shares_prompts and not self._flight.halved:
            room, tower = answering.batches.prompt_room, self._tower
            self._prompt = SharedPrompt(self._model, batch.prompt_pass, room, lambda: tower.spent_s)
        vision_tokens = int(vision_token_mask(self._model.config, inputs["input_ids"]).sum())
        self._running[index] = RunningRequest(request, inputs, vision_tokens, self._tower, self._prompt, self._saved_s)
        self._reused_before = answering.reused_tokens

    def _forget(self) -> None:
        """Reuse nothing in the next prefill."""
        self._tower.begin({})
        self._prompt = SharedPrompt(self._model, room=0)

    def _after_prompt(self, index: int, cache: CompressedCache) -> None:
        """Record a request's prefill once its prompt is stored; again if it lost its slot and started over."""
        synchronise(self._model.device)
        with self._clock.stopped():
            self._record(self._running[index], cache)

    def _record(self, each: RunningRequest, cache: CompressedCache) -> None:
        each.tower, each.prompt = copy.copy(self._tower), self._prompt
        if (reused := self._answering.reused_tokens) is not None:
            each.reused_tokens, self._reused_before = reused - self._reused_before, reused
        self._forget()  # in case this request starts over
        if each.prompt.is_known and not each.tower.calls:  # a reused prefill skips the forward that calls the tower
            each.tower.calls = dict(each.tower.known)
        if self._keeps and not self._flight.halved:
            self._answering.keep(each.request.batch, each.tower, each.prompt)
        self._is_spared |= each.prompt.is_known
        # Only the store, which bounds its memory, keeps the tensors.
        each.tower.calls = {call: replace(found, output=None) for call, found in each.tower.calls.items()}
        each.prompt.prompt_pass = each.prompt.known = None
        self._saved_s += each.correction_s
        each.saved_s = self._saved_s
        if each.request.record_kept:
            each.kept = KeptSets.of(cache)

    def _answers(self, answer: Answer, each: RunningRequest) -> Answers:
        flight, wanted, tokens_out = self._flight, each.request.wanted, len(answer.tokens)
        tpot_s = answer.tpot_s
        if tpot_s is not None:  # it includes other requests' prefills
            tpot_s += (self._saved_s - each.saved_s) / (tokens_out - 1)
        held = answer.kv_bytes_prompt
        slot = flight.kv_bytes // flight.slots if tokens_out > 1 else 0
        room = max(slot - held, 0)
        peaks = [peak_memory(self._model.device) - self._answering.held]
        peaks += [call.peak_memory for call in each.tower.calls.values()]
        measured = Measurement(
            ttft_s=answer.ttft_s + each.correction_s,
            tpot_s=tpot_s,
            tokens_in=[answer.tokens_in],
            tokens_out=[tokens_out],
            vision_tokens=[each.vision_tokens],
            kv_bytes_prompt=held + room,
            kv_bytes_end=held + room,
            kv_room_bytes=room,
            realised_ratios=[[ratio] for ratio in answer.realised_ratios],
            peak_memory_bytes=max(peaks),
        )
        seconds = self._spent_s + self._saved_s - self._counted_s
        self._counted_s += seconds
        return Answers(
            self._answering.texts(answer.tokens[None], [tokens_out], wanted.skip_special_tokens),
            seconds,
            measured,
            each.tower,
            each.prompt,
            each.inputs,
            each.kept,
            each.reused_tokens,
            flight.slots,
            answer.waited_s + each.saved_before_s,
            flight.peak_kv_bytes,
            self._is_spared,
            flight.halved > 0,
        )
