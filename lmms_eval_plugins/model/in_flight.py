"""Requests in flight: each has a prefill of its own, all decode together, and one that is done makes room for the next.

Measured as batches are: as if nothing of another cell were known.
"""

import copy
import time
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

from .answering import WARM_UP_TOKENS, Answering, Answers, InSlots
from .batches import Batch
from .generation import Generation
from .kept_tokens import KeptSets
from .prompts import on_device
from .vision_tower import VisionTower


@dataclass(frozen=True)
class Asked:
    """A request for the model: a batch of one, and how it is answered; `notes_kept`: and what each layer stores."""

    batch: Batch
    wanted: Generation
    notes_kept: bool = False


@dataclass
class UnderWay:
    """A request that the model was given, and what is known of its prefill.

    Attributes:
        inputs: on the model's device.
        vision_tokens: of the prompt.
        saved_before_s: seconds that the run was spared before it, since tower or prefill were known.
        reused_tokens: of the prompt, those that a prefix cache had; None without one.
        saved_s: the same up to the end of its prefill.
        aside_s: seconds behind its prefill that are not its own.
        kept: what each layer stores, where that is noted.
    """

    asked: Asked
    inputs: BatchFeature
    vision_tokens: int
    tower: VisionTower
    prompt: SharedPrompt
    saved_before_s: float
    reused_tokens: int | None = None
    saved_s: float = 0.0
    aside_s: float = 0.0
    kept: KeptSets | None = None

    @property
    def correction_s(self) -> float:
        """What must be added to the seconds of its prefill to get those of one where nothing is known."""
        return self.tower.correction_s + self.prompt.correction_s


class Flight:
    """Requests in flight under the compression that is in force, as an iterable over (place among the requests, its
    answer), in the order in which they are done. Leave it closed: `contextlib.closing(iter(flight))`."""

    def __init__(self, answering: Answering, asked: Iterable[Asked], limits: Limits, keeps: bool = True):
        """Each of `asked` is asked for when there is a slot for it. `keeps`: whether other cells may use what is
        computed."""
        self._answering, self._model = answering, answering.model
        self._asked, self._limits = asked, limits
        self._keeps = keeps and answering.has_cells
        self._prefixes = answering.prefixes if keeps else None  # a warm-up is one with none
        self._shares_prompts = self._keeps and answering.prefixes is None
        self._tower, self._prompt = VisionTower(self._model, {}), SharedPrompt(self._model, room=0)
        self._is_spared = False  # whether any prefill did not run
        self._under_way: dict[int, UnderWay] = {}
        # Seconds so far: of the run; those of them in which it did not answer; those that it was spared.
        self._spent_s = self._aside_s = self._saved_s = 0.0
        self._counted_s = 0.0  # in the answers so far

    def __iter__(self) -> Iterator[tuple[int, Answers]]:
        asked = iter(self._asked)
        first = next(asked, None)
        if first is None:
            return
        if not self._answering.is_warm:
            self._warm_up(first)
        of, device = self._answering.compression, self._model.device
        room = first.wanted.arguments["max_new_tokens"]
        reset_peak_memory(device)
        with (
            self._tower,
            kvcompress.compress(
                self._model, of.method, of.ratio, of.budget, room, self._prefixes, **of.options
            ) as session,
            closing(self._requests(chain([first], asked))) as requests,
        ):
            self._flight = session.generate_many(requests, **vars(self._limits), after_prompt=self._after_prompt)
            while (answer := self._next()) is not None:
                if answer.error is not None:
                    raise answer.error
                yield answer.index, self._answers(answer)

    def _warm_up(self, first: Asked) -> None:
        """Answer a request in a few tokens, without counting it."""
        few = min(first.wanted.arguments["max_new_tokens"], WARM_UP_TOKENS)
        wanted = replace(first.wanted, arguments={**first.wanted.arguments, "max_new_tokens": few})
        self._answering.is_warm = True
        for _ in Flight(self._answering, [Asked(first.batch, wanted)], self._limits, keeps=False):
            pass

    def _next(self) -> Answer | None:
        start = time.perf_counter()
        answer = next(self._flight, None)
        self._spent_s += time.perf_counter() - start
        return answer

    def _requests(self, asked: Iterator[Asked]) -> Iterator[kvcompress.Request]:
        for index in count():
            start = time.perf_counter()
            each = next(asked, None)
            if each is not None:
                inputs = on_device(each.batch.inputs, self._model.device)
                self._begin(index, each, inputs)
            self._aside_s += time.perf_counter() - start
            if each is None:
                return
            with self._prompt:
                yield kvcompress.Request(dict(inputs), each.wanted.arguments, each.wanted.seed)

    def _begin(self, index: int, asked: Asked, inputs: BatchFeature) -> None:
        """The prefill of a request is next."""
        answering, batch = self._answering, asked.batch
        self._tower.held = answering.held
        self._forget()
        if not self._flight.halved:
            self._tower.begin(answering.known_of_tower(batch))
        if self._shares_prompts and not self._flight.halved:
            room, tower = answering.batches.prompt_room, self._tower
            self._prompt = SharedPrompt(self._model, batch.prompt_pass, room, lambda: tower.spent_s)
        vision_tokens = int(vision_token_mask(self._model.config, inputs["input_ids"]).sum())
        self._under_way[index] = UnderWay(asked, inputs, vision_tokens, self._tower, self._prompt, self._saved_s)
        self._reused_before = answering.reused_tokens

    def _forget(self) -> None:
        """Nothing is known of the prefill that is next."""
        self._tower.begin({})
        self._prompt = SharedPrompt(self._model, room=0)

    def _after_prompt(self, index: int, cache: CompressedCache) -> None:
        """A request's prompt is stored; once more where it lost its slot and began anew."""
        synchronise(self._model.device)
        start, each = time.perf_counter(), self._under_way[index]
        each.tower, each.prompt = copy.copy(self._tower), self._prompt
        if (reused := self._answering.reused_tokens) is not None:
            each.reused_tokens, self._reused_before = reused - self._reused_before, reused
        self._forget()  # of one that begins anew
        if each.prompt.is_known and not each.tower.calls:  # where the model's forward calls it, it was not asked
            each.tower.calls = dict(each.tower.known)
        if self._keeps and not self._flight.halved:
            self._answering.keep(each.asked.batch, each.tower, each.prompt)
        self._is_spared |= each.prompt.is_known
        # What is kept is the store's: here it would be beyond its bounds.
        each.tower.calls = {call: replace(found, output=None) for call, found in each.tower.calls.items()}
        each.prompt.prompt_pass = each.prompt.known = None
        self._saved_s += each.correction_s
        each.saved_s = self._saved_s
        if each.asked.notes_kept:
            each.kept = KeptSets.of(cache)
        each.aside_s = time.perf_counter() - start
        self._aside_s += each.aside_s

    def _answers(self, answer: Answer) -> Answers:
        each = self._under_way.pop(answer.index)
        flight, wanted, tokens_out = self._flight, each.asked.wanted, len(answer.tokens)
        tpot_s = answer.tpot_s
        if tpot_s is not None:  # other requests' prefills are a part of it
            tpot_s += (self._saved_s - each.saved_s) / (tokens_out - 1)
        held = answer.kv_bytes_prompt
        slot = flight.kv_bytes // flight.slots if tokens_out > 1 else 0
        room = max(slot - held, 0)
        peaks = [peak_memory(self._model.device) - self._answering.held]
        peaks += [call.peak_memory for call in each.tower.calls.values()]
        measured = Measurement(
            ttft_s=answer.ttft_s + each.correction_s - each.aside_s,
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
        seconds = self._spent_s - self._aside_s + self._saved_s - self._counted_s
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
            InSlots(
                answer.waited_s + each.saved_before_s,
                flight.slots,
                flight.peak_kv_bytes,
                None if self._is_spared else measured.peak_memory_bytes,
                flight.halved > 0,
            ),
        )
