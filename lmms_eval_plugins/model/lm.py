"""The lmms-eval model `kvcompress`: any transformers chat model, with its KV cache compressed, every answer measured.

    python -m lmms_eval --model kvcompress --model_args pretrained=ID,method=snapkv,ratio=0.2 --tasks textvqa_val

Nothing here depends on a model family: the checkpoint's processor and chat template make the prompt. An exception
while answering ends the run; an empty answer is one that the model gave. All arguments: docs/model-args.md.
"""

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.protocol import ChatMessages
from lmms_eval.utils import Collator
from loguru import logger
from tqdm import tqdm
from transformers import BatchFeature

from kvcompress import KVCompressError
from kvcompress.inflight.loop import Limits

from .answer_store import AnswerStore, from_json, key_of, to_json
from .answerer import Answerer, question
from .answering import Answering, Answers
from .arguments import Compression, check_slots, make_compression, parse_arguments
from .batch_size import MOST, MOST_SLOTS, largest_batch, room_for_a_batch, searches
from .batches import Batch, BatchStore, in_order, one_batch, parts_of
from .fewshot import FewShot
from .generation import Generation, check_one_sequence, generation_of
from .in_flight import Asked, Flight
from .kept_tokens import Shown, record
from .loading import device_of, load
from .look_ahead import ahead
from .measurements import log_averages, row_of, write_rows
from .media import digest
from .prompts import ChatProcessor

Answered = tuple[list[GenerationResult], float]  # and the seconds that it took


class KVCompressLM(Answerer):
    """One loaded model; `set_cell` switches the compression without loading again.

    Attributes:
        model, processor, tokenizer: transformers' own.
        rows: since the start or the last `reset_rows`.
        overlays: for so many questions of each task a row also says which tokens were kept, see `kept_tokens.record`.
        answer_store: answers of earlier runs; None where each question is answered anew.
        few_shot: how examples are drawn and shown, where a task has any.
        batch_sizes: what was found for `batch_size=auto` in the last evaluation, in the order of the batches.
    """

    def __init__(self, needs_template: bool = True, **arguments: Any):
        """`arguments` as in docs/model-args.md; `needs_template`: whether there has to be a chat template. Raises
        KVCompressError for a wrong one, before anything is loaded."""
        super().__init__()
        self.args, compression = parse_arguments(**arguments)
        # Starts the process group where there are several processes. Without cpu=True a machine without GPU counts as
        # one process. lmms-eval's command line has made an Accelerator before, without it: so ask the group itself.
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        if torch.distributed.is_initialized():
            self._rank, self._world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.device = device_of(self.args, self.world_size)
        self.model, self.processor = load(self.args, self.device, needs_template)
        if self.args.tp_plan is not None:
            self._world_size = 1  # the processes are one model: each gives the same answer to every question
        self.chat = ChatProcessor(self.args, self.processor, self.model.dtype)
        self.tokenizer = self.chat.tokenizer
        self.batches = BatchStore(int(self.args.vision_cache_gb * 2**30), int(self.args.gb_for_prompts * 2**30))
        # The thread that looks ahead tokenises meanwhile: the two must not share a tokenizer.
        decoder = copy.deepcopy(self.tokenizer) if self.args.batches_ahead else self.tokenizer
        self.answering = Answering(self.model, decoder, self.batches, compression, self.args.prefix_cache_gb)
        self.rows: list[dict[str, Any]] = []
        self._times_asked: Counter[tuple[str, int]] = Counter()
        self.overlays = 0
        self.answer_store: AnswerStore | None = None
        self.few_shot = FewShot()
        self.batch_sizes: dict[int, int] = {}
        self._tokens: dict[tuple[str, int], int] = {}  # of each question's prompt, for `batch_size=auto`
        # Shows how far the answers are; called with the number of requests.
        self.progress_bar: Callable[[int], tqdm] = self._own_progress_bar
        self._said_oom = False

    # -- cells and measurements -----------------------------------------------------------------------------------

    @property
    def compression(self) -> Compression:
        """What is in force."""
        return self.answering.compression

    def set_cell(
        self, method: str | None = None, ratio: float | None = None, budget: int | None = None, **options: Any
    ) -> None:
        """Use another compression from now on, on the same loaded model. Raises KVCompressError."""
        compression = make_compression(method, ratio, budget, **options)
        check_slots(self.args.slots, compression.options)
        self.answering.begin_cell(compression)

    def reset_rows(self) -> None:
        self.rows = []
        self._times_asked.clear()

    def gather_rows(self) -> list[dict[str, Any]]:
        ranks = [self.rows]
        if self.world_size > 1:
            ranks = [[] for _ in range(self.world_size)]
            torch.distributed.all_gather_object(ranks, self.rows)
        return sorted(chain.from_iterable(ranks), key=lambda row: (row["task"], row["doc_id"]))

    # -- what lmms-eval asks for ----------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answers in the order of the requests, longest first: in batches of one kind of generation, or in flight."""
        self.batches.begin(request.args[4] for request in requests)
        counted = len(self.rows)
        with self.progress_bar(len(requests)) as progress:
            answer = self._answer_in_batches if self.args.slots is None else self._answer_in_flight
            results, seconds = answer(requests, progress)
        log_averages(self.rows[counted:], seconds)
        if self.args.measurements_path is not None:
            rows = self.gather_rows()
            if self.rank == 0:
                write_rows(rows, self.args.measurements_path)
        return results

    def _answer_in_batches(self, requests: list[Instance], progress: tqdm) -> Answered:
        order = Collator(
            requests,
            sort_fn=self._shortness,
            group_fn=lambda request: request.args[2],
            grouping=True,
        )
        results, seconds = [], 0.0
        groups = self._in_batches(order)
        with ahead(lambda group: (group, parts_of(group, self.prepare)), groups, self.args.batches_ahead) as prepared:
            for group, parts in prepared:
                answered = [self._answer_or_recall([group[at] for at in places], batch) for places, batch in parts]
                results += in_order([places for places, _ in parts], [each for each, _ in answered])
                seconds += sum(elapsed for _, elapsed in answered)
                progress.update(len(group))
        return order.get_original(results), seconds

    def _answer_in_flight(self, requests: list[Instance], progress: tqdm) -> Answered:
        for request in requests:
            check_one_sequence(self.args.slots, self._wanted(request).arguments)
        order = sorted(range(len(requests)), key=lambda place: self._shortness(requests[place]))
        results: list[GenerationResult | None] = [None] * len(requests)
        given: list[tuple[int, Batch] | None] = []  # place in `requests`, inputs; None once answered
        elapsed = []

        def done(place: int, result: GenerationResult, seconds: float) -> None:
            results[place] = result
            elapsed.append(seconds)
            progress.update()

        def asked(prepared: Iterator[tuple[int, Batch]]) -> Iterator[Asked]:
            for place, batch in prepared:
                request = requests[place]
                if (known := self._recalled([request], batch)) is not None:
                    (result,), seconds = known
                    done(place, result, seconds)
                    continue
                given.append((place, batch))
                wanted = self._wanted(request)
                self._times_asked[question(request)] += 1
                yield Asked(batch, wanted, self._has_overlay(request))

        limits = self._limits([requests[place] for place in order])
        with (
            ahead(lambda place: (place, self.prepare([requests[place]])), order, self.args.batches_ahead) as prepared,
            closing(iter(Flight(self.answering, asked(prepared), limits))) as flight,
        ):
            for number, answers in flight:
                place, batch = given[number]
                given[number] = None
                counted = len(self.rows)
                (result,) = self._results([requests[place]], batch, answers)
                self._store([requests[place]], batch, ([result], answers.seconds), self.rows[counted:])
                done(place, result, answers.seconds)
        return results, sum(elapsed)

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        """The answers of all rounds of each request. A round's messages come from the task, which sees the answers so
        far and says when there are no more; each round is a prompt of its own, with a row of its own."""
        if self.args.slots is not None:
            raise KVCompressError(f"slots={self.args.slots!r} goes with tasks of a single round")
        results, counted, seconds = [], len(self.rows), 0.0
        self.batches.begin(request.args[4] for request in requests)
        with self.progress_bar(len(requests)) as progress:
            for request in requests:
                _, doc_to_messages, _, doc_id, task, split = request.args
                doc = self.task_dict[task][split][doc_id]
                messages, is_over, answers, info = doc_to_messages(doc), False, [], None
                while not is_over:
                    before = len(self.rows)
                    (answer,), elapsed = self._answer_or_recall([request], self.prepare([request], [messages]))
                    for row in self.rows[before:]:
                        row["round"] = len(answers)
                    answers, seconds = [*answers, answer.text], seconds + elapsed
                    messages, is_over, answers, info = doc_to_messages(
                        doc, round_idx=len(answers), previous_output=answers, previous_round_info=info
                    )
                results.append(answers)
                progress.update()
        log_averages(self.rows[counted:], seconds)
        return results

    def unload(self) -> None:
        """Free the model."""
        del self.model, self.answering
        gc.collect()
        torch.cuda.empty_cache()

    # -- which requests are answered together ---------------------------------------------------------------------

    def _shortness(self, request: Instance) -> int:
        """What sorts the longest first: by text, or where what fits is looked for, by tokens."""
        if not self.args.fits_itself:
            return -len(request.args[0])
        _, _, _, doc_id, task, _ = request.args
        if (task, doc_id) not in self._tokens:
            inputs = self.prepare([request], may_recall=False).inputs
            self._tokens[task, doc_id] = inputs["input_ids"].shape[1]
        return -self._tokens[task, doc_id]

    def _in_batches(self, order: Collator) -> Iterable[list[Instance]]:
        if isinstance(self.batch_size, int):
            return order.get_batched(n=self.batch_size)
        self.batch_sizes, batches = {}, []
        for alike in order.get_batched(n=len(order)):  # of one kind of generation, longest first
            step = -(-len(alike) // searches(self.batch_size))
            for start in range(0, len(alike), step):
                part = alike[start : start + step]
                size = self._largest_batch(part)
                self.batch_sizes[len(batches)] = size
                batches += [part[first : first + size] for first in range(0, len(part), size)]
        return batches

    def _largest_batch(self, requests: list[Instance]) -> int:
        """How many of these requests, longest first, go into a batch. An earlier run's size is taken again, or its
        answers, which are those of whole batches, would be of no use."""
        key = key_of(requests, b"batch size")
        if self.answer_store is not None and self.answer_store.knows(key):
            return self.answer_store.get(key)
        kwargs = self._wanted(requests[0]).arguments
        size = largest_batch(
            lambda rows: self.answering.try_batch(one_batch(requests[:rows], self.prepare), kwargs),
            room=room_for_a_batch(self.device),
            most=min(len(requests), self.args.max_batch_size or MOST),
            may_fail=self.device.type == "cuda",
        )
        if self.answer_store is not None:
            self.answer_store.put(key, size)
        return size

    def _limits(self, requests: list[Instance]) -> Limits:
        """How many of these requests, longest first, decode together."""
        on_oom, most = "halve" if self.args.on_oom_in_force == "halve_batch" else "raise", len(requests)
        if self.args.slots != "auto":
            return Limits(min(self.args.slots, most), None, on_oom, self.args.prefill_tokens)
        kwargs = self._wanted(requests[0]).arguments
        one = self.answering.try_batch(self.prepare(requests[:1], may_recall=False), kwargs)
        left = 0 if one is None else room_for_a_batch(self.device) - one
        return Limits(1, None, on_oom) if left <= 0 else Limits(min(MOST_SLOTS, most), left / 2**30, on_oom)

    # -- one batch, in the order of its way -----------------------------------------------------------------------

    def prepare(
        self,
        requests: list[Instance],
        messages: list[list[dict[str, Any]] | str] | None = None,
        may_recall: bool = True,
    ) -> Batch:
        """What the model needs to answer requests; `messages` in place of their own. Runs in the background: it touches
        neither the model nor the device. `may_recall`: a batch that was answered in an earlier run has no inputs."""
        if messages is None:
            messages = [self._messages(request) for request in requests]
        chats = [each if isinstance(each, str) else ChatMessages(messages=each) for each in messages]
        key = b"".join(digest(chat) for chat in chats)
        if may_recall and self._recall_key(requests, key) is not None:
            return Batch(key, BatchFeature())
        found, prompts = self.batches.get(key), []
        if found is None or any(map(self._has_overlay, requests)):
            prompts = [self.chat.read(chat, request.args[4]) for chat, request in zip(chats, requests, strict=True)]
        if found is None:
            return Batch(key, self.chat.inputs(prompts), prompts=prompts)
        return replace(found, prompts=prompts)

    def _recall_key(self, requests: list[Instance], prompts: bytes) -> str | None:
        """Under which an earlier run's answers to a batch are known; None where they are not."""
        if self.answer_store is None or any(map(self._has_overlay, requests)):
            return None
        key = key_of(requests, prompts)
        return key if self.answer_store.knows(key) else None

    def _answer_or_recall(self, requests: list[Instance], batch: Batch) -> Answered:
        """The answers to requests, and the seconds that generating them takes, or took in an earlier run."""
        if (known := self._recalled(requests, batch)) is not None:
            return known
        counted = len(self.rows)
        answered = self._answer_within_memory(requests, batch)
        self._store(requests, batch, answered, self.rows[counted:])
        return answered

    def _recalled(self, requests: list[Instance], batch: Batch) -> Answered | None:
        """An earlier run's answers, whose rows are added; None where there are none."""
        if (key := self._recall_key(requests, batch.key)) is None:
            return None
        results, rows, seconds = from_json(self.answer_store.get(key))
        self.rows += rows
        return results, seconds

    def _store(self, requests: list[Instance], batch: Batch, answered: Answered, rows: list[dict[str, Any]]) -> None:
        """Keep answers for later runs, where that was asked for."""
        if self.answer_store is None or any(map(self._has_overlay, requests)):
            return
        if not self._wanted(requests[0]).arguments["do_sample"]:  # else a question asked again gets another answer
            self.answer_store.put(key_of(requests, batch.key), to_json(answered[0], rows, answered[1]))

    def _answer_within_memory(self, requests: list[Instance], batch: Batch) -> Answered:
        """`_answer`, tried again as `on_oom` says when the device's memory does not suffice."""
        wanted = self.args.on_oom_in_force
        try:
            return self._answer(requests, batch)
        except torch.OutOfMemoryError:
            is_single = wanted == "halve_batch" and len(requests) == 1
            if wanted == "raise" or is_single or not self.answering.can_offload:
                raise
        # Behind the `except`, whose traceback would keep what did not fit alive.
        gc.collect()
        torch.cuda.empty_cache()
        if not self._said_oom:
            logger.warning(f"out of memory at batch size {len(requests)}: on_oom={wanted}, from here on where needed")
            self._said_oom = True
        counted = len(self.rows)
        if wanted == "halve_batch":
            half = len(requests) // 2
            first, first_s = self._answer_or_recall(requests[:half], self.prepare(requests[:half]))
            second, second_s = self._answer_or_recall(requests[half:], self.prepare(requests[half:]))
            results, seconds = first + second, first_s + second_s
        else:
            with self.answering.offloaded():
                results, seconds = self._answer(requests, batch)
        for row in self.rows[counted:]:
            row["on_oom"] = wanted
        return results, seconds

    def _answer(self, requests: list[Instance], batch: Batch) -> Answered:
        """The answers to requests, and the seconds that generating them takes; adds the rows of counted requests."""
        if self.args.tp_plan is not None and self.world_size > 1:
            raise KVCompressError("tp_plan: lmms-eval would share the questions out; run lmms_eval_plugins.evaluate")
        answers = self.answering.answer(batch, self._wanted(requests[0]), any(map(self._has_overlay, requests)))
        self._times_asked.update(map(question, requests))
        return self._results(requests, batch, answers), answers.seconds

    def _wanted(self, request: Instance) -> Generation:
        wanted = generation_of(request.args[2], self.args.max_new_tokens)
        if wanted.seed is None:
            return wanted
        # Another one each time that a question is asked.
        return replace(wanted, seed=wanted.seed + self._times_asked[question(request)])

    def _results(self, requests: list[Instance], batch: Batch, answers: Answers) -> list[GenerationResult]:
        """What lmms-eval is told; adds the rows of counted requests."""
        results = []
        for place, request in enumerate(requests):
            text, measured = self._wanted(request).cut(answers.texts[place]), answers.measured
            counts = TokenCounts(input_tokens=measured.tokens_in[place], output_tokens=measured.tokens_out[place])
            results.append(GenerationResult(text=text, token_counts=counts))
            self.cache_hook.add_partial("generate_until", (request.args[0], request.args[2]), text)
            if request.metadata.get("__padding_only__"):
                continue
            self.rows.append({**row_of(request, answers, place, batch.media[place]), "rank": self.rank, "answer": text})
            if self._has_overlay(request):
                if place not in batch.shown:
                    batch.shown[place] = Shown.of(self.model, self.chat, batch.prompts[place], answers.inputs, place)
                self.rows[-1]["survivors"] = record(batch.shown[place], answers.kept, place, len(requests))
        return results

    # -- small things ---------------------------------------------------------------------------------------------

    def _messages(self, request: Instance) -> list[dict[str, Any]] | str:
        _, doc_to_messages, _, doc_id, task, split = request.args
        return self.few_shot.messages(doc_to_messages, self.task_dict[task][split][doc_id], doc_id)

    def _has_overlay(self, request: Instance) -> bool:
        return request.args[3] < self.overlays

    def _own_progress_bar(self, total: int) -> tqdm:
        of = self.compression
        kept = f"budget {of.budget}" if of.budget else f"{of.ratio or 1:g}"
        return tqdm(total=total, desc=f"{of.method} {kept}", disable=self.rank != 0)
