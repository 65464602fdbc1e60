"""Answer a prepared batch with the compressed model, and measure it as if nothing were reused from another cell."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lmms_eval.api.instance import Instance
from loguru import logger
from transformers import BatchFeature, PreTrainedModel, PreTrainedTokenizerBase

import kvcompress
from kvcompress import KVCompressError
from kvcompress.bench.cost import launches_bind
from kvcompress.cache.cache import CompressedCache
from kvcompress.device import synchronise
from kvcompress.hooks.model import text_decoder, unwrapped
from kvcompress.hooks.prefix_cache import PrefixCache
from kvcompress.hooks.shared_prompt import SharedPrompt
from kvcompress.measure import Measurement

from .batches import Batch, BatchStore, EncodedCalls
from .generation import Generation
from .input_methods import Compression
from .kept_tokens import KeptSets
from .prompts import on_device
from .reduced_inputs import TokensOf
from .stopwatch import Stopwatch
from .vision_tower import VisionTower

WARM_UP_TOKENS = 4
# cache_implementation -> its counterpart in CPU memory.
OFFLOADED = {"dynamic": "offloaded", "static": "offloaded_static"}


@dataclass(frozen=True)
class Answers:
    """The answers to a batch.

    Attributes:
        texts: one per row.
        seconds: the time to generate them, vision tower and prefill included, whether these ran now or were reused;
            for a request in flight, the seconds since the previous one finished.
        measured: the measurements in detail, corrected in the same way.
        tower, prompt: which calls of the vision tower and which prefill ran now, and which were reused.
        inputs: the model inputs, on the model's device.
        kept: what each layer stores; None unless requested.
        reused_tokens: how many prompt tokens came from a prefix cache; None without one.
        slots: of a request in flight, the number of slots; None for a batch.
        waited_s: of a request in flight, seconds from the start of the run's first request to the start of this one.
        run_kv_bytes: of a request in flight, the run's peak up to its end.
        is_spared: of a request in flight, whether the run has reused a prefill so far.
        halved: of a request in flight, whether the run has given up slots so far because memory ran out.
    """

    texts: list[str]
    seconds: float
    measured: Measurement
    tower: VisionTower
    prompt: SharedPrompt
    inputs: BatchFeature
    kept: KeptSets | None
    reused_tokens: int | None = None
    slots: int | None = None
    waited_s: float | None = None
    run_kv_bytes: int | None = None
    is_spared: bool = False
    halved: bool = False

    def row(self, request: Instance, batch: Batch, place: int) -> dict[str, Any]:
        """Return the measurements of one request, that of row `place`.

        Times and peak memory are the batch's; KV bytes are the row's share of it. A request in flight is a batch of its
        own, but for the peaks, which are the run's. Where a prefix cache spared a part of the prefill, there is no time
        to first token; of a request in flight, whose tokens wait for other prefills, none per token with such a cache.
        The realised ratio is a share of the prompt before its pictures were shrunk or left out."""
        _, _, _, doc_id, task, split = request.args
        measured, tower, prompt, batch_size = self.measured, self.tower, self.prompt, len(self.texts)
        # Where a pass is kept or was, other things lie in memory than where it just runs.
        is_spared = bool(prompt.prompt_pass or self.reused_tokens) if self.slots is None else self.is_spared
        beams = len(measured.realised_ratios[0]) // batch_size
        whole = batch.whole[place] or TokensOf(measured.tokens_in[place], measured.vision_tokens[place])
        shown = measured.tokens_in[place] / whole.all
        return {
            "task": task,
            "doc_id": doc_id,
            "split": split,
            "batch_size": batch_size,
            "slots": self.slots,
            "waited_s": self.waited_s,
            "ttft_s": None if self.reused_tokens else measured.ttft_s,
            "vision_s": tower.seconds,
            "vision_is_known": tower.is_known,
            "prompt_is_known": prompt.is_known,
            "tpot_s": None if self.slots is not None and self.reused_tokens is not None else measured.tpot_s,
            "tokens_in": whole.all,
            "tokens_out": measured.tokens_out[place],
            "vision_tokens": whole.vision,
            "reused_tokens": None if self.reused_tokens is None else self.reused_tokens // batch_size,
            "images": batch.media[place][0],
            "videos": batch.media[place][1],
            "kv_bytes_prompt": measured.kv_bytes_prompt // batch_size,
            "kv_bytes_end": measured.kv_bytes_end // batch_size,
            "kv_held_bytes": (measured.kv_bytes_prompt - measured.kv_room_bytes) // batch_size,
            "kv_room_bytes": measured.kv_room_bytes // batch_size,
            "realised_ratio": [shown * layer[place * beams] for layer in measured.realised_ratios],
            "peak_kv_bytes": self.run_kv_bytes or max(measured.kv_bytes_prompt, measured.kv_bytes_end),
            "peak_memory_bytes": None if is_spared else measured.peak_memory_bytes,
            "share_s": self.seconds / batch_size,
            # What was done when memory ran out.
            "on_oom": "halve_batch" if self.halved else None,
            "shows": batch.shows[place].hex(),
        }


class Answering:
    """Answers batches with one model under the current compression.

    Attributes:
        tokenizer: decodes the answers, and prompts for `protect_text=`; no other thread may use it meanwhile.
        batches: stores each batch's vision features and prefill if another cell may follow.
        is_warm: whether the current cell has had its warm-up.
        has_cells: whether another cell may follow.
        shares_media: whether questions share images or videos.
        clock: times the answers; it stands still while a run only records them or prepares others.
        prefixes: the prefixes of all cells' prompts; None if they are not cached.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batches: BatchStore,
        compression: Compression,
    ):
        self.model, self.tokenizer, self.batches, self.compression = model, tokenizer, batches, compression
        self.is_warm = self.has_cells = self.shares_media = self._has_advised = False
        self.prefixes: PrefixCache | None = None
        self.clock = Stopwatch()

    def begin_cell(self, compression: Compression) -> None:
        """Switch to another compression."""
        self.compression, self.is_warm, self.has_cells = compression, False, True

    @property
    def reused_tokens(self) -> int | None:
        """Prompt tokens that came from the prefix cache so far; None without one."""
        return None if self.prefixes is None else self.prefixes.reused_tokens

    def answer(self, batch: Batch, wanted: Generation, record_kept: bool = False) -> Answers:
        """Generate the answers to a batch. The first batch of a cell first generates a few tokens as a warm-up.

        `record_kept`: also return what each layer stores.
        """
        kwargs = wanted.arguments
        inputs = on_device(batch.inputs, self.model.device)
        is_first = not self.is_warm
        if is_first:
            self._warm_up(batch, inputs, kwargs)
        tower = VisionTower(self.model, self.known_of_tower(batch), self.held)
        # The first batch of a cell runs its own prefill: its memory peak stands for the cell's, and so does its time to
        # first token where a prefix cache serves the others.
        shares = self.has_cells and not is_first
        prompt = self._shared_prompt(batch, tower) if shares else SharedPrompt(self.model, room=0)
        prefixes = None if is_first else self.prefixes
        if wanted.seed is not None:
            torch.manual_seed(wanted.seed)
        synchronise(self.model.device)
        start = self.clock()
        reused = self.reused_tokens
        new, measured, kept = self.generate(inputs, kwargs, tower, prompt, record_kept, prefixes=prefixes)
        synchronise(self.model.device)
        seconds = self.clock() - start + tower.correction_s + prompt.correction_s
        if not self._has_advised and (advice := static_advice(self.model, self.compression, measured)):
            logger.warning(advice)
            self._has_advised = True
        self.keep(batch, tower, prompt)
        texts = self.texts(new, measured.tokens_out, wanted.skip_special_tokens)
        reused = None if reused is None else self.reused_tokens - reused
        return Answers(texts, seconds, measured, tower, prompt, inputs, kept, reused)

    def _warm_up(self, batch: Batch, inputs: BatchFeature, kwargs: dict[str, Any]) -> None:
        """Generate a few tokens without measuring. If another cell answered this batch, reuse its prefill: the forward
        pass is warm then, and only the method's own work is not."""
        was_answered = self.batches.get(batch.key) is not None
        tower = VisionTower(self.model, self.known_of_tower(batch))
        prompt = self._shared_prompt(batch, tower) if was_answered else SharedPrompt(self.model, room=0)
        self.generate(inputs, with_few_tokens(kwargs), tower, prompt)
        if was_answered:
            self.batches.keep(batch, prompt.prompt_pass)
        self.is_warm = True

    def _shared_prompt(self, batch: Batch, tower: VisionTower) -> SharedPrompt:
        """Return a prefill shared with other cells; with a prefix cache, which shares it already, nothing is."""
        if self.prefixes is not None:
            return SharedPrompt(self.model, room=0)
        return SharedPrompt(self.model, batch.prompt_pass, self.batches.prompt_room, lambda: tower.spent_s)

    @property
    def _watches_tower(self) -> bool:
        """Whether the method reads the vision tower, which slows it down: its times must not mix with other cells'."""
        tokens = self.compression.policy.tokens
        return tokens is not None and tokens.watches_tower

    def known_of_tower(self, batch: Batch) -> EncodedCalls:
        """Return the vision features stored for what a batch shows."""
        return {} if self._watches_tower else self.batches.encoded(batch)

    def keep(self, batch: Batch, tower: VisionTower, prompt: SharedPrompt) -> None:
        """Store what other cells, or other questions about the same images and videos, can reuse."""
        if (self.has_cells or self.shares_media) and not self._watches_tower:
            self.batches.keep_encoded(batch, tower.calls)
        if self.has_cells:
            self.batches.keep(batch, prompt.prompt_pass)

    def texts(self, new: torch.LongTensor, lengths: list[int], skip_special_tokens: bool) -> list[str]:
        """Decode the answers (batch, new) without their end token and padding."""
        if skip_special_tokens:
            return self.tokenizer.batch_decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        rows = [row[:length].tolist() for row, length in zip(new, lengths, strict=True)]
        rows = [row[:-1] if row and row[-1] in ends else row for row in rows]
        return [self.tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in rows]

    def session(self, room: int, prefixes: PrefixCache | None) -> kvcompress.Session:
        """Return a session under the current compression, with room for so many new tokens."""
        return kvcompress.compress(
            self.model,
            max_new_tokens=room,
            prefix_cache=prefixes,
            tokenizer=self.tokenizer,
            **self.compression.of_cache,
        )

    def generate(
        self,
        inputs: BatchFeature,
        kwargs: dict[str, Any],
        tower: VisionTower,
        prompt: SharedPrompt,
        record_kept: bool = False,
        room_for: int | None = None,
        prefixes: PrefixCache | None = None,
    ) -> tuple[torch.LongTensor, Measurement, KeptSets | None]:
        """Return the new tokens (batch, new), their measurements as if tower and prefill had run, and what is stored.

        `room_for`: how many new tokens the cache has room for; default: `max_new_tokens`. `prefixes`: the prefix cache
        that the prompts share.
        """
        with tower, prompt, self.session(room_for or kwargs["max_new_tokens"], prefixes) as session:
            tokens, measured = kvcompress.measure.generate(self.model, session, dict(inputs), **kwargs)
            kept = self._kept(session.cache) if record_kept else None
        if prompt.is_known and not tower.calls:  # a reused prefill skips the forward that calls the tower
            tower.calls = dict(tower.known)
        peaks = [measured.peak_memory_bytes - tower.held, *(call.peak_memory for call in tower.calls.values())]
        ttft_s = measured.ttft_s + tower.correction_s + prompt.correction_s
        return tokens, replace(measured, ttft_s=ttft_s, peak_memory_bytes=max(peaks)), kept

    def _kept(self, cache: CompressedCache) -> KeptSets:
        synchronise(self.model.device)
        with self.clock.stopped():
            return KeptSets.of(cache)

    @property
    def can_offload(self) -> bool:
        """Whether this kind of KV cache can be offloaded to CPU memory."""
        return self.compression.cache_implementation in OFFLOADED

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Keep the KV cache in CPU memory inside this context."""
        before = self.compression
        self.compression = before.stored_as(OFFLOADED[before.cache_implementation])
        self.is_warm = False
        try:
            yield
        finally:
            self.compression = before

    @property
    def held(self) -> int:
        """Bytes stored for other cells that a peak would count: on a CPU, where the whole process is measured."""
        if self.model.device.type != "cpu":
            return 0
        return self.batches.nbytes + (0 if self.prefixes is None else self.prefixes.nbytes)


def with_few_tokens(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate` for a warm-up or a trial."""
    return {**kwargs, "max_new_tokens": min(kwargs["max_new_tokens"], WARM_UP_TOKENS)}


def static_advice(model: PreTrainedModel, compression: Compression, measured: Measurement) -> str | None:
    """Return a line that recommends fixed shapes, or None.

    They are recommended if they work with the compression and the measured decode step is bound by launches
    (kvcompress/bench/cost.py)."""
    if compression.cache_implementation != "dynamic" or measured.tpot_s is None:
        return None
    try:
        compression.stored_as("static")
    except KVCompressError:
        return None
    layers, weights = decoded_with(model)
    if not launches_bind(layers, weights, measured.kv_bytes_prompt, model.device):
        return None
    return (
        f"{len(measured.tokens_out)} rows, {weights / 1e9:.2g} GB of weights and {measured.kv_bytes_prompt / 1e9:.2g} "
        f"GB of cache keep this GPU busy for less time than launching a step's kernels takes: with "
        "cache_implementation=static a step is one graph, which the first answer compiles"
    )


def decoded_with(model: PreTrainedModel) -> tuple[int, int]:
    """Return the decoder's number of layers, and the bytes of weights that a decode step reads.

    These include the weights of the logits and, in a mixture of experts, all experts."""
    decoder, head = text_decoder(model), unwrapped(model).get_output_embeddings()
    looked_up = {id(parameter) for parameter in decoder.get_input_embeddings().parameters()}
    read = [parameter for parameter in decoder.parameters() if id(parameter) not in looked_up]
    read += [] if head is None else head.parameters()
    return decoder.config.num_hidden_layers, sum(parameter.nbytes for parameter in read)
