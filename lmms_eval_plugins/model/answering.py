"""A prepared batch is answered by the model, compressed, and measured as if nothing of another cell were known."""

import contextlib
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from loguru import logger
from transformers import BatchFeature, PreTrainedModel, PreTrainedTokenizerBase

import kvcompress
from kvcompress.device import synchronise
from kvcompress.hooks.prefix_cache import PrefixCache
from kvcompress.hooks.shared_prompt import SharedPrompt
from kvcompress.measure import Measurement

from .advice import static_advice
from .arguments import Compression, make_compression
from .batch_size import PeakOfTensors
from .batches import Batch, BatchStore
from .generation import Generation
from .kept_tokens import KeptSets
from .prompts import on_device
from .vision_tower import Encoded, VisionTower, tensor_bytes

WARM_UP_TOKENS = 4
# cache_implementation -> the same in the CPU's memory.
OFFLOADED = {"dynamic": "offloaded", "static": "offloaded_static"}


@dataclass(frozen=True)
class InSlots:
    """Of a request that was answered beside others, each in a slot.

    Attributes:
        waited_s: from the start of the run's first request to this one's.
        slots: how many there were.
        peak_kv_bytes, peak_memory_bytes: the run's, up to the request's end; of memory None where prefills are kept.
        halved: whether memory did not suffice so far, and slots were given up.
    """

    waited_s: float
    slots: int
    peak_kv_bytes: int
    peak_memory_bytes: int | None
    halved: bool


@dataclass(frozen=True)
class Answers:
    """The answers to a batch.

    Attributes:
        texts: one per row.
        seconds: what generating them takes where vision tower and prefill run; `measured`: the like, in detail.
            Of a request in flight: the seconds since the one that was done before it.
        tower, prompt: what of these ran now, and what was known.
        inputs: what was generated from, on the model's device.
        kept: what each layer stores; None where that was not asked for.
        reused_tokens: of the prompts, those that a prefix cache had; None without one.
        in_slots: None for a batch.
    """

    texts: list[str]
    seconds: float
    measured: Measurement
    tower: VisionTower
    prompt: SharedPrompt
    inputs: BatchFeature
    kept: KeptSets | None
    reused_tokens: int | None = None
    in_slots: InSlots | None = None


class Answering:
    """One model, which answers batch after batch under the compression in force.

    Attributes:
        tokenizer: decodes the answers; no other thread may use it meanwhile.
        batches: where a batch's vision features and prefill are kept, once another cell may follow.
        is_warm: whether the cell had its warm-up.
        has_cells: whether another cell may follow.
        prefixes: what the cell's prompts begin with; None where that is not kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batches: BatchStore,
        compression: Compression,
        prefix_gb: float = 0.0,
    ):
        """`prefix_gb`: gigabytes for what a cell's prompts begin with."""
        self.model, self.tokenizer, self.batches, self.compression = model, tokenizer, batches, compression
        self.is_warm = self.has_cells = self._has_advised = False
        self._prefix_gb = prefix_gb
        self.forget_prefixes()

    def begin_cell(self, compression: Compression) -> None:
        """Answer under another compression from now on."""
        self.compression, self.is_warm, self.has_cells = compression, False, True
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """What is counted next begins with nothing: every cell's times are those of a cold start."""
        self.prefixes = PrefixCache(self._prefix_gb) if self._prefix_gb else None

    @property
    def reused_tokens(self) -> int | None:
        """Prompt tokens, so far, that a prefix cache had; None without one."""
        return None if self.prefixes is None else self.prefixes.reused_tokens

    def answer(self, batch: Batch, wanted: Generation, notes_kept: bool = False) -> Answers:
        """Generate as `wanted`; before the first batch of a cell a few tokens more, as a warm-up.

        `notes_kept`: also say what each layer stores.
        """
        kwargs = wanted.arguments
        inputs = on_device(batch.inputs, self.model.device)
        is_first = not self.is_warm
        if is_first:
            self._warm_up(batch, inputs, kwargs)
        tower = VisionTower(self.model, self.known_of_tower(batch), self.held)
        # The first batch of a cell runs its own prefill: its peak of memory is the cell's.
        shares = self.has_cells and not is_first
        prompt = self._shared_prompt(batch, tower) if shares else SharedPrompt(self.model, room=0)
        if wanted.seed is not None:
            torch.manual_seed(wanted.seed)
        synchronise(self.model.device)
        start = time.perf_counter()
        reused = self.reused_tokens
        new, measured, kept = self.generate(inputs, kwargs, tower, prompt, notes_kept)
        synchronise(self.model.device)
        seconds = time.perf_counter() - start + tower.correction_s + prompt.correction_s
        if not self._has_advised and (advice := static_advice(self.model, self.compression, measured)):
            logger.warning(advice)
            self._has_advised = True
        if self.has_cells:
            self.keep(batch, tower, prompt)
        texts = self.texts(new, measured.tokens_out, wanted.skip_special_tokens)
        reused = None if reused is None else self.reused_tokens - reused
        return Answers(texts, seconds, measured, tower, prompt, inputs, kept, reused)

    def _warm_up(self, batch: Batch, inputs: BatchFeature, kwargs: dict[str, Any]) -> None:
        """Generate a few tokens, of which nothing is measured. The prefill is another cell's, once the batch was
        answered in one: the pass itself is warm then, and what the method does with it is not."""
        was_answered = self.batches.get(batch.key) is not None
        tower = VisionTower(self.model, self.known_of_tower(batch))
        prompt = self._shared_prompt(batch, tower) if was_answered else SharedPrompt(self.model, room=0)
        self.generate(
            inputs, {**kwargs, "max_new_tokens": min(kwargs["max_new_tokens"], WARM_UP_TOKENS)}, tower, prompt
        )
        if was_answered:
            self.batches.keep(batch, {}, prompt.prompt_pass)
        self.is_warm = True
        self.forget_prefixes()

    def _shared_prompt(self, batch: Batch, tower: VisionTower) -> SharedPrompt:
        """A prefill that is shared with other cells; none where prompts of a cell share theirs, which is measured."""
        if self.prefixes is not None:
            return SharedPrompt(self.model, room=0)
        return SharedPrompt(self.model, batch.prompt_pass, self.batches.prompt_room, lambda: tower.spent_s)

    @property
    def _watches_tower(self) -> bool:
        """A method that looks at the tower makes it slower: neither its time nor another's is the other's."""
        tokens = self.compression.policy().tokens
        return tokens is not None and tokens.sees == "tower"

    def known_of_tower(self, batch: Batch) -> dict[tuple[str, int], Encoded]:
        """What the vision tower gave for a batch in another cell."""
        return {} if self._watches_tower else dict(batch.encoded)

    def keep(self, batch: Batch, tower: VisionTower, prompt: SharedPrompt) -> None:
        """Keep what other cells can use."""
        self.batches.keep(batch, {} if self._watches_tower else tower.calls, prompt.prompt_pass)

    def texts(self, new: torch.LongTensor, lengths: list[int], skip_special_tokens: bool) -> list[str]:
        """The answers (batch, new) as text; the token that ends one, and the pads behind it, are no part of it."""
        if skip_special_tokens:
            return self.tokenizer.batch_decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        rows = [row[:length].tolist() for row, length in zip(new, lengths, strict=True)]
        rows = [row[:-1] if row and row[-1] in ends else row for row in rows]
        return [self.tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in rows]

    def generate(
        self,
        inputs: BatchFeature,
        kwargs: dict[str, Any],
        tower: VisionTower,
        prompt: SharedPrompt,
        notes_kept: bool = False,
        room_for: int | None = None,
    ) -> tuple[torch.LongTensor, Measurement, KeptSets | None]:
        """New tokens (batch, new), what they cost where vision tower and prefill run, and what is stored.

        `room_for`: so many new tokens have room in the cache; None: as many as are generated at most.
        """
        of, room = self.compression, room_for or kwargs["max_new_tokens"]
        with (
            tower,
            prompt,
            kvcompress.compress(
                self.model, of.method, of.ratio, of.budget, room, self.prefixes, **of.options
            ) as session,
        ):
            tokens, measured = kvcompress.measure.generate(self.model, session, dict(inputs), **kwargs)
            kept = KeptSets.of(session.cache) if notes_kept else None
        if prompt.is_known and not tower.calls:  # where the model's forward calls it, it was not asked
            tower.calls = dict(tower.known)
        peaks = [measured.peak_memory_bytes - tower.held, *(call.peak_memory for call in tower.calls.values())]
        ttft_s = measured.ttft_s + tower.correction_s + prompt.correction_s
        return tokens, replace(measured, ttft_s=ttft_s, peak_memory_bytes=max(peaks)), kept

    def try_batch(self, batch: Batch, kwargs: dict[str, Any]) -> int | None:
        """The bytes that answering a batch takes at most: a few tokens are generated, with room for all. None where
        memory did not suffice. Nothing of it is kept, and the cell still has its warm-up."""
        device, few = self.model.device, {**kwargs, "max_new_tokens": min(kwargs["max_new_tokens"], WARM_UP_TOKENS)}
        on_gpu = device.type == "cuda"
        before = torch.cuda.memory_allocated(device) if on_gpu else -tensor_bytes(dict(batch.inputs))
        try:
            inputs = on_device(batch.inputs, device)
            tower, prompt = VisionTower(self.model, {}), SharedPrompt(self.model, room=0)
            with contextlib.nullcontext() if on_gpu else PeakOfTensors() as counted:
                _, measured, _ = self.generate(inputs, few, tower, prompt, room_for=kwargs["max_new_tokens"])
            return (measured.peak_memory_bytes if on_gpu else counted.peak) - before
        except torch.OutOfMemoryError:
            pass
        finally:
            self.forget_prefixes()
        # Behind the `except`, whose traceback would keep what did not fit alive.
        gc.collect()
        torch.cuda.empty_cache()
        return None

    @property
    def can_offload(self) -> bool:
        """Whether the KV cache has a twin in the CPU's memory."""
        return self._implementation in OFFLOADED

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Inside, the KV cache lies in the CPU's memory."""
        before = self.compression
        options = {**before.options, "cache_implementation": OFFLOADED[self._implementation]}
        self.compression = make_compression(before.method, before.ratio, before.budget, **options)
        self.is_warm = False
        try:
            yield
        finally:
            self.compression = before

    @property
    def _implementation(self) -> str:
        return self.compression.options.get("cache_implementation", "dynamic")

    @property
    def held(self) -> int:
        """Bytes that are kept for other cells, where the process's memory is counted: they are not a generation's."""
        return self.batches.nbytes if self.model.device.type == "cpu" else 0
