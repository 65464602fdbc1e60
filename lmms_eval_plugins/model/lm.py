"""The lmms-eval model `kvcompress`: any transformers chat model with a compressed KV cache; every answer is measured.

    python -m lmms_eval --model kvcompress --model_args pretrained=ID,method=snapkv,ratio=0.2 --tasks textvqa_val

Nothing here depends on a model family: the checkpoint's processor and chat template make the prompt. An exception
ends the run and never turns into an empty answer. All arguments: docs/model-args.md.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
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
from kvcompress.command_line import called
from kvcompress.device import release_memory
from kvcompress.hooks.prefix_cache import PrefixCache

from .answer_store import AnswerStore, from_json, key_of, to_json
from .answerer import Answerer, question
from .answering import Answering, Answers
from .arguments import check_options, make_compression, parse_arguments
from .batch_size import Sizes
from .batches import Batch, BatchStore, ahead
from .fewshot import FewShot
from .generation import Generation, check_one_sequence, generation_of
from .in_flight import Flight, FlightRequest
from .input_methods import Compression
from .kept_tokens import Shown, record
from .loading import device_of, load
from .measurements import log_averages, write_rows
from .prompts import ChatProcessor, digest, in_order, parts_of
from .ranks import Dealt
from .reduced_inputs import Reducer
from .shared_media import SharedMedia, media_of

WORTH_SHARING = 1.5  # questions per image or video, in the mean, from which on a prefix cache is worth its memory

Answered = tuple[list[GenerationResult], float]  # answers, and the seconds they took


class KVCompressLM(Answerer):
    """A loaded model; `set_cell` switches the compression without reloading.

    Attributes:
        model, processor, tokenizer: transformers' own.
        rows: the measurement rows since the start or the last `reset_rows`.
        overlays: rows of a task's questions before this one also record the kept tokens, see `kept_tokens.record`.
        answer_store: answers of earlier runs; None to answer every question anew.
        few_shot: how few-shot examples are drawn and shown.
        sizes: how many requests are answered together.
    """

    def __init__(self, needs_template: bool = True, **arguments: Any):
        """`arguments` as in docs/model-args.md; `needs_template`: whether a chat template is required. Raises
        KVCompressError for a wrong argument before anything is loaded."""
        super().__init__()
        self.args, compression = parse_arguments(**arguments)
        # Starts the process group if there are several processes. Without cpu=True, a machine without a GPU counts as
        # one process. lmms-eval's command line has already created an Accelerator without it, so ask the group itself.
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
        # The look-ahead thread tokenizes meanwhile; two threads must not share a tokenizer.
        decoder = copy.deepcopy(self.tokenizer) if self.args.batches_ahead else self.tokenizer
        self._reducer = Reducer(self.chat, self.model.config)
        self.answering = Answering(self.model, decoder, self.batches, compression)
        self._times_asked: Counter[tuple[str, int]] = Counter()
        self.overlays = 0
        self.answer_store: AnswerStore | None = None
        self.few_shot = FewShot()
        self.sizes = Sizes(self.args, self.answering, self.prepare, self._wanted)
        # Makes the progress bar for a number of requests.
        self.progress_bar: Callable[[int], tqdm] = self._own_progress_bar
        self._said_oom = False

    @property
    def batch_sizes(self) -> dict[int, int]:
        """What lmms-eval records about `batch_size=auto`; see `Sizes.found`."""
        return self.sizes.found

    # -- cells and measurements -----------------------------------------------------------------------------------

    @property
    def compression(self) -> Compression:
        """The current compression."""
        return self.answering.compression

    def set_cell(
        self, method: str | None = None, ratio: float | None = None, budget: int | None = None, **options: Any
    ) -> None:
        """Switch the loaded model to another compression. Raises KVCompressError."""
        compression = make_compression(method, ratio, budget, **options)
        check_options(self.args, compression.options)
        self.answering.begin_cell(compression)

    def reset_rows(self) -> None:
        super().reset_rows()
        self._times_asked.clear()

    # -- what lmms-eval calls -------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answer requests, longest first, in batches or in flight; return the answers in the order of the requests."""
        self._begin(requests)
        dealt = None
        if self.answering.prefixes is not None and self.world_size > 1:
            dealt = Dealt(requests, self._media.groups(requests), self.rank)
            requests = dealt.requests
            self._media = SharedMedia(requests, self.task_dict)
        counted = len(self.rows)
        with self.progress_bar(len(requests)) as progress:
            answer = self._answer_in_batches if self.args.slots is None else self._answer_in_flight
            results, seconds = answer(requests, progress)
        self._end(counted, seconds)
        return results if dealt is None else dealt.returned(results)

    def _begin(self, requests: list[Instance]) -> None:
        """Prepare for these requests: forget other tasks, find shared images and videos, set up the prefix cache."""
        has_other_tasks = self.batches.begin(request.args[4] for request in requests)
        self._media = SharedMedia(requests, self.task_dict)
        groups = list(chain.from_iterable(self._of_each_rank(self._media.groups(requests))))
        self.answering.shares_media = share = len(groups) >= WORTH_SHARING * len(set(groups))
        gigabytes = self.args.gb_for_prefixes(share)
        if not gigabytes:
            self.answering.prefixes = None
        elif has_other_tasks or self.answering.prefixes is None:
            self.answering.prefixes = PrefixCache(gigabytes, device="cpu")

    def _end(self, counted: int, seconds: float) -> None:
        """Report the rows from `counted` on, and the seconds that the answers took."""
        log_averages(self.rows[counted:], seconds)
        if self.args.measurements_path is not None:
            rows = self.gather_rows()
            if self.rank == 0:
                write_rows(rows, self.args.measurements_path)

    def _answer_in_batches(self, requests: list[Instance], progress: tqdm) -> Answered:
        order = Collator(
            requests,
            sort_fn=self._sort_key(requests),
            group_fn=lambda request: request.args[2],
            grouping=True,
        )
        results, seconds = [], 0.0
        groups = self.sizes.batches(order, self.answer_store)
        with ahead(lambda group: (group, parts_of(group, self.prepare)), groups, self.args.batches_ahead) as prepared:
            for group, parts in prepared:
                answered = [self._answer_or_recall([group[at] for at in places], batch) for places, batch in parts]
                results += in_order([places for places, _ in parts], [each for each, _ in answered])
                seconds += sum(elapsed for _, elapsed in answered)
                self._show(progress, len(group))
        return order.get_original(results), seconds

    def _answer_in_flight(self, requests: list[Instance], progress: tqdm) -> Answered:
        if not requests:  # other ranks have them all
            return [], 0.0
        for request in requests:
            check_one_sequence(self.args.slots, self._wanted(request).arguments)
        key = self._sort_key(requests)
        order = sorted(range(len(requests)), key=lambda place: key(requests[place]))
        results: list[GenerationResult | None] = [None] * len(requests)
        elapsed = []

        def done(place: int, result: GenerationResult, seconds: float) -> None:
            results[place] = result
            elapsed.append(seconds)
            self._show(progress)

        def unanswered(prepared: Iterator[tuple[int, Batch]]) -> Iterator[FlightRequest]:
            for place, batch in prepared:
                request = requests[place]
                if (known := self._recalled([request], batch)) is not None:
                    (result,), seconds = known
                    done(place, result, seconds)
                    continue
                wanted = self._wanted(request)
                self._times_asked[question(request)] += 1
                yield FlightRequest(place, batch, wanted, self._has_overlay(request))

        limits = self.sizes.limits([requests[place] for place in order])
        with (
            ahead(lambda place: (place, self.prepare([requests[place]])), order, self.args.batches_ahead) as prepared,
            closing(iter(Flight(self.answering, unanswered(prepared), limits))) as flight,
        ):
            for asked, answers in flight:
                request, counted = [requests[asked.place]], len(self.rows)
                (result,) = self._results(request, asked.batch, answers)
                self._store(request, asked.batch, ([result], answers.seconds), self.rows[counted:])
                done(asked.place, result, answers.seconds)
        return results, sum(elapsed)

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        """Answer all rounds of each request. The task sees the answers so far, gives the messages of the next round and
        decides when to stop; each round is a separate prompt with its own row."""
        if self.args.slots is not None:
            raise KVCompressError(f"slots={self.args.slots!r} works only with tasks of a single round")
        results, counted, seconds = [], len(self.rows), 0.0
        self._begin(requests)
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
        self._end(counted, seconds)
        return results

    def unload(self) -> None:
        """Free the model and what is stored for other cells."""
        del self.model, self.answering, self.sizes, self.batches
        release_memory()

    # -- which requests are answered together ---------------------------------------------------------------------

    def _sort_key(self, requests: list[Instance]) -> Callable[[Instance], Any]:
        """Return a sort key that puts the longest prompt first, and with a prefix cache keeps shared media together."""
        if self.answering.prefixes is None:
            return self.sizes.shortness
        return self._media.together(requests, self.sizes.shortness)

    # -- one batch, step by step ----------------------------------------------------------------------------------

    def prepare(
        self,
        requests: list[Instance],
        messages: list[list[dict[str, Any]] | str] | None = None,
        may_recall: bool = True,
    ) -> Batch:
        """Prepare the model inputs of requests, without touching model or device: it runs in the background. `messages`
        replaces the requests' own; with `may_recall`, a batch that an earlier run answered gets no inputs."""
        if messages is None:
            messages = [self._messages(request) for request in requests]
        chats = [each if isinstance(each, str) else ChatMessages(messages=each) for each in messages]
        key = b"".join([*map(digest, chats), self.compression.identity])
        if may_recall and self._stored(requests, key) is not None:
            return Batch(key, BatchFeature())
        found, prompts = self.batches.get(key), []
        if found is None or any(map(self._has_overlay, requests)):
            prompts = [self.chat.read(chat, request.args[4]) for chat, request in zip(chats, requests, strict=True)]
        if found is None:
            prompts, whole = self._reducer.reduced(prompts, self.compression)
            shows, inputs = [*map(media_of, messages)], self.chat.inputs(prompts)
            return Batch(key, inputs, shows, prompts=prompts, whole=whole, reduction=self.compression.identity)
        return replace(found, prompts=prompts)

    def _stored(self, requests: list[Instance], prompts: bytes) -> dict[str, Any] | None:
        """Return what is stored of an earlier run's answers to a batch; None if nothing is."""
        return self.answer_store.get(key_of(requests, prompts)) if self._uses_store(requests) else None

    def _uses_store(self, requests: list[Instance]) -> bool:
        return self.answer_store is not None and not any(map(self._has_overlay, requests))

    def _answer_or_recall(self, requests: list[Instance], batch: Batch) -> Answered:
        """Answer requests, or recall an earlier run's answers with the seconds they took."""
        if (known := self._recalled(requests, batch)) is not None:
            return known
        counted = len(self.rows)
        answered = self._answer_within_memory(requests, batch)
        self._store(requests, batch, answered, self.rows[counted:])
        return answered

    def _recalled(self, requests: list[Instance], batch: Batch) -> Answered | None:
        """Return an earlier run's answers and add their rows; None if there are none."""
        if (stored := self._stored(requests, batch.key)) is None:
            return None
        results, rows, seconds = from_json(stored)
        self.rows += rows
        return results, seconds

    def _store(self, requests: list[Instance], batch: Batch, answered: Answered, rows: list[dict[str, Any]]) -> None:
        """Store answers for later runs, if there is a store."""
        # A sampled answer must differ when asked again.
        if self._uses_store(requests) and not self._wanted(requests[0]).arguments["do_sample"]:
            self.answer_store.put(key_of(requests, batch.key), to_json(answered[0], rows, answered[1]))

    def _answer_within_memory(self, requests: list[Instance], batch: Batch) -> Answered:
        """Call `_answer`, and retry as `on_oom` says if the device runs out of memory."""
        wanted = self.args.on_oom_in_force
        try:
            return self._answer(requests, batch)
        except torch.OutOfMemoryError:
            is_single = wanted == "halve_batch" and len(requests) == 1
            if wanted == "raise" or is_single or (wanted == "offload" and not self.answering.can_offload):
                raise
        # After the `except` block, whose traceback would keep the tensors that did not fit alive.
        release_memory()
        if not self._said_oom:
            logger.warning(f"out of memory at batch size {len(requests)}: applying on_oom={wanted} whenever needed")
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
        """Answer requests with the model and add the rows of the counted ones."""
        if self.args.tp_plan is not None and self.world_size > 1:
            raise KVCompressError(
                f"tp_plan= needs `{called('eval')}`: lmms-eval's own command would split the questions"
            )
        answers = self.answering.answer(batch, self._wanted(requests[0]), any(map(self._has_overlay, requests)))
        self._times_asked.update(map(question, requests))
        return self._results(requests, batch, answers), answers.seconds

    def _wanted(self, request: Instance) -> Generation:
        wanted = generation_of(request.args[2], self.args.max_new_tokens)
        if wanted.seed is None:
            return wanted
        # A different seed each time the same question is asked.
        return replace(wanted, seed=wanted.seed + self._times_asked[question(request)])

    def _results(self, requests: list[Instance], batch: Batch, answers: Answers) -> list[GenerationResult]:
        """Return the results for lmms-eval and add the rows of the counted requests."""
        results = []
        for place, request in enumerate(requests):
            text, measured = self._wanted(request).cut(answers.texts[place]), answers.measured
            counts = TokenCounts(input_tokens=measured.tokens_in[place], output_tokens=measured.tokens_out[place])
            results.append(GenerationResult(text=text, token_counts=counts))
            self.cache_hook.add_partial("generate_until", (request.args[0], request.args[2]), text)
            if request.metadata.get("__padding_only__"):
                continue
            self.rows.append({**answers.row(request, batch, place), "rank": self.rank, "answer": text})
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
        # A prompt that shows something else has no token in common with the other methods' overlays.
        return request.args[3] < self.overlays and self.compression.inputs is None

    def _show(self, progress: tqdm, answered: int = 1) -> None:
        """Advance the progress bar."""
        if (prefixes := self.answering.prefixes) is not None and prefixes.prompt_tokens:
            share = prefixes.reused_tokens / prefixes.prompt_tokens
            progress.set_postfix_str(f"{share:.0%} of prompt tokens known", refresh=False)
        progress.update(answered)

    def _own_progress_bar(self, total: int) -> tqdm:
        of = self.compression
        kept = f"budget {of.budget}" if of.budget else f"{of.ratio or 1:g}"
        return tqdm(total=total, desc=f"{of.method} {kept}", disable=self.rank != 0)
