"""Decode many requests together on compressed caches; each prompt is prefilled and compressed alone.

A slot that becomes free is filled immediately, so no request waits for a longer one to finish. Prompts and decode steps
take turns: after each prompt, or each piece of one, all running requests decode a token. A request's tokens do not
depend on the others, since its prompt has its own forward passes and its evictions depend on its own steps."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.cache import CompressedCache
from ..cache_name import CACHE
from ..device import device_of, on_device, release_memory
from ..errors import KVCompressError, one_line
from .cache import SlotCache
from .request import Answer, Request
from .request_state import ConnectedModel, RequestState


def check_storage(cache_implementation: str) -> None:
    """Raise KVCompressError for a storage that slots do not have."""
    if cache_implementation not in ("dynamic", "static"):
        raise KVCompressError(
            f"requests in flight do not go with cache_implementation={cache_implementation!r}; dynamic and static do"
        )


@dataclass(frozen=True)
class Limits:
    """How many requests decode together, and how much of a prompt is prefilled between two steps.

    See `Session.generate_many`. Raises KVCompressError for a wrong value."""

    slots: int | None = None
    kv_gb: float | None = None
    on_oom: str = "halve"
    prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.slots is None and self.kv_gb is None:
            raise KVCompressError("give slots= (requests that decode together) or kv_gb= (gigabytes for all of them)")
        for name, counted in (("slots", "requests"), ("prefill_tokens", "tokens of a prompt")):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise KVCompressError(f"{name}={value!r} is not an integer of at least 1: it counts {counted}")
        if self.kv_gb is not None and (not isinstance(self.kv_gb, int | float) or not 0 < self.kv_gb < math.inf):
            raise KVCompressError(f"kv_gb={self.kv_gb!r} is not a positive number: it counts gigabytes")
        if self.on_oom not in ("halve", "raise"):
            raise KVCompressError(f"on_oom={self.on_oom!r} is neither 'halve' nor 'raise'")


class InFlight:
    """An iterator over the answers, in the order in which they finish. See `Session.generate_many`.

    Attributes:
        slots: the most sequences that decode together; 0 before this is known.
        steps: decode steps so far.
        halved: how often the slots were halved because memory ran out.
        clock: returns the seconds by which answers are timed. One that stands still during a caller's own work, such as
            preparing a prompt, leaves it out of all answers' times.
    """

    def __init__(
        self,
        connected: ConnectedModel,
        requests: Iterable[Request | Mapping[str, torch.Tensor]],
        limits: Limits,
        is_fixed: bool,
        after_prompt: Callable[[int, CompressedCache], None] | None,
        options: Mapping[str, Any],
    ):
        """`is_fixed` says whether every step has the same shapes; other arguments are as in `Session.generate_many`."""
        self._connected, self._options = connected, options
        self._limits, self._most = limits, limits.slots
        self._handled = (torch.OutOfMemoryError,) if limits.on_oom == "halve" else ()  # by halving the slots
        self._is_fixed, self._after_prompt = is_fixed, after_prompt
        self.clock: Callable[[], float] = time.perf_counter
        self.steps = self.halved = self._answered_tokens = self._peak_kv_bytes = self._last_slots = 0
        self._new = enumerate(requests)
        self._again: deque[tuple[int, Request]] = deque()  # requests that lost their slot
        self._running: dict[int, RequestState] = {}  # by slot
        self._prefilling: RequestState | None = None  # the request being prefilled
        self._next: RequestState | None = None  # the request that waits for a slot, its prompt compressed
        self._cache: SlotCache | None = None
        self._call: Callable = connected.model
        self._error: str | None = None  # that ended the run
        self._answers = self._generate()

    def __iter__(self) -> Iterator[Answer]:
        return self

    def __next__(self) -> Answer:
        if self._error is not None:
            raise KVCompressError(f"these requests broke off ({self._error}): start with those that have no answer")
        while (answer := next(self._answers)) is None:
            pass
        return answer

    def close(self) -> None:
        """Free the slots and end; requests that are under way get no answer."""
        self._answers.close()

    def by_step(self) -> Iterator[list[Answer]]:
        """Yield, after each decode step, the answers that have finished since the previous one."""
        done = []
        for answer in self._answers:
            if answer is not None:
                done.append(answer)
                continue
            yield done
            done = []
        if done:
            yield done

    @property
    def slots(self) -> int:
        cache = self._cache
        return self._last_slots if cache is None else cache.slots

    @property
    def tokens(self) -> int:
        """Tokens of all answers so far, unfinished ones included; not those of requests that failed or begin again."""
        unfinished = [*self._running.values(), *([] if self._next is None else [self._next])]
        return self._answered_tokens + sum(len(each.sampler.tokens) for each in unfinished)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all slots."""
        cache = self._cache  # another thread may end the run meanwhile
        return 0 if cache is None else cache.nbytes

    @property
    def peak_kv_bytes(self) -> int:
        """The most bytes held for keys and values at one time: all slots, and the prompt being prefilled."""
        return max(self._peak_kv_bytes, self.kv_bytes)

    # -- the loop

    def _generate(self) -> Iterator[Answer | None]:
        """Yield the answers, and None after each step. After an error the slots' memory is free."""
        try:
            yield from self._answered()
        except BaseException as error:
            self._error = None if isinstance(error, GeneratorExit) else one_line(f"{type(error).__name__}: {error}")
            self._end()
            raise

    def _answered(self) -> Iterator[Answer | None]:
        self._began = self.clock()
        while True:
            if not self._connected.is_connected():
                raise KVCompressError("kvcompress.compress(...) was left while requests were in flight")
            is_free = self._next is None and len(self._running) < max(self.slots, 1)
            if self._prefilling is None and is_free:
                self._prefilling = self._next_request()
            is_prefilling = self._prefilling is not None
            if is_prefilling:
                yield from self._prefill()
            yield from self._admit()
            if self._running:
                yield from self._step()
                yield None
            elif self._next is not None:
                yield self._too_large()
            elif not is_prefilling:  # all is answered
                self._end()
                return

    def _end(self) -> None:
        """Free the slots' memory, even if this object stays."""
        self._peak_kv_bytes, self._last_slots = self.peak_kv_bytes, self.slots
        self._cache = self._next = self._prefilling = None
        self._running.clear()

    def _next_request(self) -> RequestState | None:
        """Return the next request, None if there is none."""
        following = self._again.popleft() if self._again else next(self._new, None)
        if following is None:
            return None
        return RequestState(*following, self.clock, self._began, self._limits.prefill_tokens)

    def _prefill(self) -> Iterator[Answer]:
        """Prefill the next piece of the current prompt; after the last piece, choose the first token.

        Yields an answer if that token is the only one, or if the request failed."""
        current, is_out_of_memory = self._prefilling, False
        try:
            logits = current.prefill(self._connected, self._options)
            self._peak_kv_bytes = max(self._peak_kv_bytes, self.kv_bytes + current.nbytes)
            if logits is None:
                return
            if self._after_prompt is not None:
                self._after_prompt(current.index, current.cache)
            current.end_prompt()
            self._prefilling = None
            if not current.add(current.sampler.next_token(logits)):
                self._next = current
                return
            answer = self._answer_of(current)
        except torch.OutOfMemoryError as error:
            if not self._handled:
                raise
            is_out_of_memory, text = True, str(error)
        except Exception as error:
            answer = current.failed(error)
        self._prefilling = None
        # After the `except`, whose traceback keeps the failed pass's memory alive.
        if is_out_of_memory and self._make_room():
            self._again.appendleft((current.index, current.request))
            return
        yield self._give_up(current, text) if is_out_of_memory else answer

    def _admit(self) -> Iterator[Answer]:
        """Move the waiting request into a slot of its size, if there is one.

        Yields an answer if memory does not even hold a single slot of that size."""
        if self._next is None:
            return
        running, cache = self._next, self._next.cache
        if self._cache is None:
            self._cache, config = SlotCache(cache, self._is_fixed), running.sampler.config
            if self._connected.model._valid_auto_compile_criteria({CACHE: self._cache}, config):
                self._call = self._connected.model.get_compiled_call(config.compile_config)
        room = running.sampler.room - 1
        if not running.sizes:
            running.sizes = self._cache.sizes_for(cache, room)
        sizes = [max(pair) for pair in zip(running.sizes, self._cache.sizes, strict=True)]
        slots = self._slots_of(sizes)
        if not self._running and (own := self._slots_of(running.sizes)) > slots:  # none needs the current size
            sizes, slots = running.sizes, own
        if len(self._running) >= slots:
            return
        try:
            if (slots, sizes) != (self._cache.slots, self._cache.sizes):
                self._resize(slots, sizes)
            slot = next(slot for slot in range(slots) if slot not in self._running)
            self._cache.fill(slot, cache)
        except self._handled:
            pass
        else:
            running.cache, self._next = None, None
            self._running[slot] = running
            return
        del cache
        self._again.appendleft((running.index, running.request))
        self._next, running.cache = None, None
        self._start_over(max(slots // 2, 1))
        if slots == 1:
            self._again.popleft()
            yield self._give_up(running)

    def _slots_of(self, sizes: list[int]) -> int:
        """Return how many slots of this size are allowed."""
        if self._limits.kv_gb is None:
            return self._most
        fit = int(self._limits.kv_gb * 2**30 // self._cache.nbytes_for(sizes))
        return fit if self._most is None else min(fit, self._most)

    def _resize(self, slots: int, sizes: list[int]) -> None:
        self._peak_kv_bytes = self.peak_kv_bytes
        self._cache.resize(slots, sizes)
        self._running = dict(enumerate(self._running.values()))

    @torch.no_grad()
    def _step(self) -> Iterator[Answer]:
        """Feed every running request's latest token; yield the finished answers."""
        try:
            chosen, logits = self._feed()
        except self._handled:
            chosen = None
        if chosen is None:
            self._cache.take_back()
            yield from self._shrink()
            return
        self.steps += 1
        done, lost = [], False
        for slot, running in list(self._running.items()):
            running.position += 1
            try:
                sampler = running.sampler
                token = chosen[slot] if sampler.is_greedy else sampler.next_token(logits[slot])
                if not running.add(token):
                    continue
                done.append(self._answer_of(running))
            except self._handled:
                lost = self.slots > 1
                if lost:
                    self._again.append((running.index, running.request))
                else:
                    done.append(self._give_up(running))
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                done.append(running.failed(error))
            self._free(slot)
        yield from done  # before an eviction that may fail
        if lost:
            yield from self._shrink()
        yield from self._evict()

    def _feed(self) -> tuple[list[int], torch.Tensor]:
        """Feed the slots' latest tokens. Returns the most likely next token of each slot, and the logits (slots,
        vocabulary)."""
        ids, positions = [0] * self.slots, [0] * self.slots
        for slot, running in self._running.items():
            ids[slot], positions[slot] = running.sampler.tokens[-1], running.position
        device = device_of(self._connected.model)
        output = self._call(
            input_ids=on_device(ids, device)[:, None],
            position_ids=on_device(positions, device)[:, None],
            use_cache=True,
            return_dict=True,
            **{CACHE: self._cache},
        )
        logits = output.logits[:, -1]
        chosen = logits.argmax(-1).tolist()
        self._cache.end_step()
        return chosen, logits

    def _answer_of(self, complete: RequestState) -> Answer:
        self._answered_tokens += len(complete.sampler.tokens)
        return complete.answer()

    def _evict(self) -> Iterator[Answer]:
        while self._running:
            with suppress(*self._handled):
                return self._cache.evict()
            yield from self._shrink()

    def _free(self, slot: int) -> None:
        self._cache.free(slot)
        del self._running[slot]

    # -- out of memory

    def _too_large(self) -> Answer:
        """Return the waiting request's answer if no slot of its size fits."""
        running, self._next = self._next, None
        size = self._cache.nbytes_for(running.sizes)
        error = KVCompressError(
            f"one slot takes {size / 2**30:.3g} GB for this request, with room for max_new_tokens="
            f"{running.sampler.room}, which is more than kv_gb={self._limits.kv_gb:.3g}"
        )
        return running.failed(error)

    def _shrink(self) -> Iterator[Answer]:
        """Reduce the number of slots; if there is only one, give up its request.

        This must run after the `except` block, whose traceback keeps the failed step's memory alive."""
        if not self._make_room():
            ((slot, running),) = self._running.items()
            self._free(slot)
            yield self._give_up(running)

    def _give_up(self, running: RequestState, text: str = "not enough memory for this request alone") -> Answer:
        """Return the answer of a request that no number of slots could make: they were halved for it alone, and the
        others get back as many as there were."""
        self._most = self._limits.slots
        return running.failed(torch.OutOfMemoryError(text))

    def _make_room(self) -> bool:
        """Halve the slots; return False if there is nothing left to give up.

        The newest requests lose their slots. They and the prompt being prefilled start again later."""
        was_prefilling = self._prefilling is not None
        if was_prefilling:
            self._again.appendleft((self._prefilling.index, self._prefilling.request))
            self._prefilling = None
        if self.slots < 2:
            has_slot = self._cache is not None and not self._running
            if has_slot:
                self._peak_kv_bytes, self._cache = self.peak_kv_bytes, None
            return has_slot or was_prefilling
        self._most, self.halved = self.slots // 2, self.halved + 1
        for slot, running in reversed(list(self._running.items())[self._most :]):
            self._free(slot)
            self._again.appendleft((running.index, running.request))
        try:
            self._resize(self._most, self._cache.sizes)
        except torch.OutOfMemoryError:
            pass
        else:
            release_memory()
            return True
        self._start_over(self._most)
        return True

    def _start_over(self, most: int) -> None:
        """Give back all slots, of which some layers may have more than others; their requests start again, at most
        `most` at a time."""
        self._again.extendleft((running.index, running.request) for running in reversed(self._running.values()))
        self._peak_kv_bytes, self._most, self.halved = self.peak_kv_bytes, most, self.halved + 1
        self._running, self._cache = {}, None
        release_memory()
