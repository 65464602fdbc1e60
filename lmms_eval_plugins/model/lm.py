"""The lmms-eval model `kvcompress`: any transformers chat model, with its KV cache compressed, every answer measured.

    python -m lmms_eval --model kvcompress --model_args pretrained=ID,method=snapkv,ratio=0.2 --tasks textvqa_val

Nothing here depends on a model family: the checkpoint's processor and chat template make the prompt. An exception
while answering ends the run; an empty answer is one that the model gave. All arguments: docs/model-args.md.
"""

import copy
import functools
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from lmms_eval.protocol import ChatMessages
from lmms_eval.utils import Collator
from loguru import logger
from tqdm import tqdm
from transformers import (
    BatchFeature,
)

import kvcompress
from kvcompress import KVCompressError
from kvcompress.hooks.shared_prompt import SharedPrompt
from kvcompress.measure import Measurement
from kvcompress.policy.policy import make_policy

from .arguments import generation_arguments, make_cell, parse_arguments
from .batches import Prepared, PreparedStore
from .kept_tokens import kept_sets, record
from .loading import device_of, load
from .look_ahead import ahead
from .measurements import QUANTITIES, summarise, write_rows
from .media import Prompt, digest, read_messages, resize_with_qwen_vl_utils
from .vision_tower import VisionTower

WARM_UP_TOKENS = 4
# Where times are not those of single questions:
LOOK_AHEAD = 2  # batches
PROMPT_CACHE_GB = 4.0
# cache_implementation -> the same in the CPU's memory, for `on_oom=offload`.
OFFLOADED = {"dynamic": "offloaded", "static": "offloaded_static"}


class KVCompressLM(lmms):
    """One loaded model; `set_cell` switches the compression without loading again.

    Attributes:
        args: the model arguments; cell: the compression in force.
        model, processor, tokenizer: transformers' own.
        rows: one measurement per counted request since the start or the last `reset_rows`.
        overlays: for so many questions of each task a row also holds `survivors`, see `survivors.record`.
    """

    is_simple = False

    def __init__(self, **arguments: Any):
        """`arguments` as in docs/model-args.md. Raises KVCompressError for a wrong one, before anything is loaded."""
        super().__init__()
        self.args, self.cell = parse_arguments(**arguments)
        # Starts the process group where there are several processes. Without cpu=True a machine without GPU counts as
        # one process. lmms-eval's command line has made an Accelerator before, without it: so ask the group itself.
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        if torch.distributed.is_initialized():
            self._rank, self._world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.device = device_of(self.args, self.world_size)
        self.model, self.processor = load(self.args, self.device)
        if self.args.tp_plan is not None:
            self._world_size = 1  # the processes are one model: each gives the same answer to every question
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.has_vision = self.tokenizer is not self.processor
        self.rows: list[dict[str, Any]] = []
        self.overlays = 0  # of a task's first so many questions it is noted which tokens survived
        self.prepared = PreparedStore(int(self.args.vision_cache_gb * 2**30), int(self._prompt_cache_gb * 2**30))
        # Shows how far the answers are; called with the number of requests.
        self.progress_bar: Callable[[int], tqdm] = self._own_progress_bar
        self._is_warm = self._said_oom = False
        self._has_cells = False  # another cell may follow, for which batches are worth keeping

    # -- cells and measurements -----------------------------------------------------------------------------------

    def set_cell(
        self, method: str | None = None, ratio: float | None = None, budget: int | None = None, **options: Any
    ) -> None:
        """Use another compression from now on, on the same loaded model. Raises KVCompressError."""
        self.cell = make_cell(method, ratio, budget, **options)
        self._is_warm, self._has_cells = False, True

    def reset_rows(self) -> None:
        self.rows = []

    def gather_rows(self) -> list[dict[str, Any]]:
        """The rows of all ranks, the same list on each, sorted by task and document. All ranks must call it."""
        ranks = [self.rows]
        if self.world_size > 1:
            ranks = [[] for _ in range(self.world_size)]
            torch.distributed.all_gather_object(ranks, self.rows)
        return sorted(chain.from_iterable(ranks), key=lambda row: (row["task"], row["doc_id"]))

    # -- what lmms-eval asks for ----------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        return self.args.batch_size

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answers in the order of the requests; batches hold requests of one kind of generation, longest text first."""
        order = Collator(
            requests,
            sort_fn=lambda request: -len(request.args[0]),
            group_fn=lambda request: request.args[2],
            grouping=True,
        )
        results, seconds, counted = [], 0.0, len(self.rows)
        self.prepared.begin(request.args[4] for request in requests)
        batches = order.get_batched(n=self.batch_size)
        with (
            self.progress_bar(len(requests)) as progress,
            ahead(lambda batch: (batch, self._prepare(batch)), batches, self._look_ahead) as prepared,
        ):
            for batch, inputs in prepared:
                answers, elapsed = self._answer_within_memory(batch, inputs)
                results += answers
                seconds += elapsed
                progress.update(len(batch))
        self._log(self.rows[counted:], seconds)
        if self.args.measurements_path is not None:
            rows = self.gather_rows()
            if self.rank == 0:
                write_rows(rows, self.args.measurements_path)
        return order.get_original(results)

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        """The answers of all rounds of each request. A round's messages come from the task, which sees the answers so
        far and says when there are no more; each round is a prompt of its own, with a row of its own."""
        results, counted, seconds = [], len(self.rows), 0.0
        self.prepared.begin(request.args[4] for request in requests)
        with self.progress_bar(len(requests)) as progress:
            for request in requests:
                _, doc_to_messages, _, doc_id, task, split = request.args
                doc = self.task_dict[task][split][doc_id]
                messages, is_over, answers, info = doc_to_messages(doc), False, [], None
                while not is_over:
                    before = len(self.rows)
                    prepared = self._prepare([request], [messages])
                    (answer,), elapsed = self._answer_within_memory([request], prepared)
                    for row in self.rows[before:]:
                        row["round"] = len(answers)
                    answers, seconds = [*answers, answer.text], seconds + elapsed
                    messages, is_over, answers, info = doc_to_messages(
                        doc, round_idx=len(answers), previous_output=answers, previous_round_info=info
                    )
                results.append(answers)
                progress.update()
        self._log(self.rows[counted:], seconds)
        return results

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError(
            "--model kvcompress answers generate_until tasks only: a likelihood over a given answer is computed in one "
            "prompt pass, which KV compression does not change"
        )

    def clean(self) -> None:
        """Keeps the model: lmms-eval calls this after every evaluation, and one model serves several. See `unload`."""

    def unload(self) -> None:
        """Free the model."""
        del self.model
        gc.collect()
        torch.cuda.empty_cache()

    # -- one batch ------------------------------------------------------------------------------------------------

    def _answer_within_memory(self, batch: list[Instance], prepared: Prepared) -> tuple[list[GenerationResult], float]:
        """`_answer`, tried again as `on_oom` says when the device's memory does not suffice."""
        wanted = self.args.on_oom
        try:
            return self._answer(batch, prepared)
        except torch.OutOfMemoryError:
            offloaded = OFFLOADED.get(self.cell.options.get("cache_implementation", "dynamic"))
            if wanted == "raise" or (wanted == "halve_batch" and len(batch) == 1) or (not offloaded):
                raise
        # Behind the `except`, whose traceback would keep what did not fit alive.
        gc.collect()
        torch.cuda.empty_cache()
        if not self._said_oom:
            logger.warning(f"out of memory at batch size {len(batch)}: on_oom={wanted}, from here on where needed")
            self._said_oom = True
        counted = len(self.rows)
        if wanted == "halve_batch":
            half = len(batch) // 2
            first, first_s = self._answer_within_memory(batch[:half], self._prepare(batch[:half]))
            second, second_s = self._answer_within_memory(batch[half:], self._prepare(batch[half:]))
            answers, elapsed = first + second, first_s + second_s
        else:
            before = self.cell
            self.set_cell(
                before.method, before.ratio, before.budget, **{**before.options, "cache_implementation": offloaded}
            )
            try:
                answers, elapsed = self._answer(batch, prepared)
            finally:
                self.cell = before
        for row in self.rows[counted:]:
            row["on_oom"] = wanted
        return answers, elapsed

    def _answer(self, batch: list[Instance], prepared: Prepared) -> tuple[list[GenerationResult], float]:
        """The answers to a batch, and the seconds that generating them takes; adds the rows of counted requests."""
        if self.args.tp_plan is not None and self.world_size > 1:
            raise KVCompressError("tp_plan: lmms-eval would share the questions out; run lmms_eval_plugins.evaluate")
        inputs = self._on_device(prepared.inputs)
        kwargs, until = generation_arguments(batch[0].args[2], self.args.max_new_tokens)
        # A method that looks at the tower makes it slower: neither its time nor another's is the other's.
        tower = VisionTower(self.model, {} if self._watches_tower else dict(prepared.encoded), self._held)
        # The first batch of a cell runs its own prompt pass: its peak of memory is the cell's.
        shares = self._has_cells and self._is_warm
        prompt = SharedPrompt(
            self.model,
            prepared.prompt_pass if shares else None,
            self.prepared.prompt_room if shares else 0,
            lambda: tower.spent_s,
        )
        if not self._is_warm:
            few = min(kwargs["max_new_tokens"], WARM_UP_TOKENS)
            self._generate(inputs, {**kwargs, "max_new_tokens": few}, VisionTower(self.model, tower.known), prompt)
            self._is_warm = True
        start = time.perf_counter()
        tokens, measured = self._generate(inputs, kwargs, tower, prompt)
        elapsed = time.perf_counter() - start + tower.correction_s + prompt.correction_s
        if self._has_cells:
            self.prepared.keep(prepared, {} if self._watches_tower else tower.calls, prompt.prompt_pass)
        texts = self._decoder.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        results = []
        for row, (request, text) in enumerate(zip(batch, texts, strict=True)):
            text = _cut(text, until)
            counts = TokenCounts(input_tokens=measured.tokens_in[row], output_tokens=measured.tokens_out[row])
            results.append(GenerationResult(text=text, token_counts=counts))
            self.cache_hook.add_partial("generate_until", (request.args[0], request.args[2]), text)
            if not request.metadata.get("__padding_only__"):
                self.rows.append(self._row(request, measured, tower, prompt, row, len(batch)))
                if request.args[3] < self.overlays:
                    self.rows[-1]["survivors"] = record(self, prepared.prompts[row], inputs, self._kept, row)
        return results, elapsed

    def _prepare(self, batch: list[Instance], messages: list[list[dict[str, Any]]] | None = None) -> Prepared:
        """What the model needs to answer a batch; `messages` in place of the requests' own. Runs in the background:
        it touches neither the model nor the device."""
        if messages is None:
            messages = [self._messages(request) for request in batch]
        chats = [ChatMessages(messages=each) for each in messages]
        key = b"".join(digest(chat) for chat in chats)
        found, prompts = self.prepared.get(key), []
        if found is None or any(request.args[3] < self.overlays for request in batch):
            prompts = [self._read(chat, request) for chat, request in zip(chats, batch, strict=True)]
        if found is None:
            return Prepared(key, self._processed(prompts), prompts=prompts)
        return replace(found, prompts=prompts)

    def _messages(self, request: Instance) -> list[dict[str, Any]]:
        _, doc_to_messages, _, doc_id, task, split = request.args
        return doc_to_messages(self.task_dict[task][split][doc_id])

    def _prompt(self, request: Instance) -> Prompt:
        return self._read(ChatMessages(messages=self._messages(request)), request)

    def _read(self, messages: ChatMessages, request: Instance) -> Prompt:
        """The prompt that `messages` are, of a request."""
        prompt = read_messages(messages, self.args.max_frames_num)
        if not self.has_vision and (prompt.images or prompt.videos):
            raise KVCompressError(
                f"task {request.args[4]!r} shows images or videos, but {self.args.pretrained} is a text-only model"
            )
        if self.args.image_resize is not None:
            patch_size = self.processor.image_processor.patch_size
            prompt.images = [resize_with_qwen_vl_utils(image, patch_size) for image in prompt.images]
        if self.args.system_prompt is not None:
            system = self._resolve_system_prompt(self.args.system_prompt)
            prompt.conversation = self._apply_system_prompt(prompt.conversation, system)
        return prompt

    def _inputs(self, prompts: list[Prompt]) -> BatchFeature:
        """Model inputs for a batch of prompts, left-padded, on the model's device."""
        return self._on_device(self._processed(prompts))

    def _on_device(self, inputs: BatchFeature) -> BatchFeature:
        return BatchFeature(dict(inputs)).to(self.model.device)

    def _processed(self, prompts: list[Prompt]) -> BatchFeature:
        """`_inputs` on the CPU, pixels in the model's precision."""
        conversations = [prompt.conversation for prompt in prompts]
        if not self.has_vision:  # many templates of text-only models take strings, not lists of parts
            conversations = [
                [
                    {**message, "content": "".join(part["text"] for part in message["content"])}
                    for message in conversation
                ]
                for conversation in conversations
            ]
        texts = [
            self.processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
            for conversation in conversations
        ]
        arguments: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
        # A chat template writes the begin-of-sequence token where the model wants one.
        bos = self.tokenizer.bos_token
        if not self._is_plain and (not self.has_vision or (bos and texts[0].startswith(bos))):
            arguments["add_special_tokens"] = False
        if any(prompt.images for prompt in prompts):
            images = [prompt.images for prompt in prompts]
            # LLaVA-OneVision's processor takes each image of a flat list for the only one of its question.
            arguments["images"] = list(chain.from_iterable(images)) if self.args.tile_every_image else images
        if any(prompt.videos for prompt in prompts):
            arguments["videos"] = [video for prompt in prompts for video in prompt.videos]
            arguments["video_metadata"] = [metadata for prompt in prompts for metadata in prompt.video_metadata]
            arguments["do_sample_frames"] = False
        inputs = dict(self.processor(text=texts, **arguments))
        # Frames' positions are multiples of it, so it is not rounded.
        exact = {name: value for name, value in inputs.items() if name == "second_per_grid_ts"}
        return BatchFeature({**BatchFeature(inputs).to(self.model.dtype), **exact})

    def _generate(
        self, inputs: BatchFeature, kwargs: dict[str, Any], tower: VisionTower, prompt: SharedPrompt
    ) -> tuple[torch.LongTensor, Measurement]:
        """New tokens (batch, new) under the current cell, and what they cost where vision tower and prompt pass run."""
        cell = self.cell
        with (
            tower,
            prompt,
            kvcompress.compress(
                self.model, cell.method, cell.ratio, cell.budget, kwargs["max_new_tokens"], **cell.options
            ) as session,
        ):
            tokens, measured = kvcompress.measure.generate(self.model, session, dict(inputs), **kwargs)
            self._kept = kept_sets(session.cache) if self.overlays else {}
        if prompt.is_known and not tower.calls:  # where the model's forward calls it, it was not asked
            tower.calls = dict(tower.known)
        peaks = [measured.peak_memory_bytes - tower.held, *(call.peak_memory for call in tower.calls.values())]
        ttft_s = measured.ttft_s + tower.correction_s + prompt.correction_s
        return tokens, replace(measured, ttft_s=ttft_s, peak_memory_bytes=max(peaks))

    def _row(
        self,
        request: Instance,
        measured: Measurement,
        tower: VisionTower,
        prompt: SharedPrompt,
        row: int,
        batch_size: int,
    ) -> dict[str, Any]:
        """A request's measurements. Times and peak memory are the batch's; KV bytes are the row's share of it."""
        _, _, _, doc_id, task, split = request.args
        beams = len(measured.realised_ratios[0]) // batch_size
        return {
            "task": task,
            "doc_id": doc_id,
            "split": split,
            "batch_size": batch_size,
            "ttft_s": measured.ttft_s,
            "vision_s": tower.seconds,
            "vision_is_known": tower.is_known,
            "prompt_is_known": prompt.is_known,
            "tpot_s": measured.tpot_s,
            "tokens_in": measured.tokens_in[row],
            "tokens_out": measured.tokens_out[row],
            "vision_tokens": measured.vision_tokens[row],
            "kv_bytes_prompt": measured.kv_bytes_prompt // batch_size,
            "kv_bytes_end": measured.kv_bytes_end // batch_size,
            "realised_ratio": [layer[row * beams] for layer in measured.realised_ratios],
            # Where a pass is kept or was, other things lie in memory than where it just runs.
            "peak_memory_bytes": None if prompt.prompt_pass else measured.peak_memory_bytes,
            "on_oom": None,  # what was done where memory did not suffice
        }

    def _log(self, rows: list[dict[str, Any]], seconds: float) -> None:
        """The averages that lmms-eval prints and writes under `throughput` (this rank's)."""
        if not rows:
            return
        tokens = sum(row["tokens_out"] for row in rows)
        summary = summarise(rows)
        means = {name: summary[name]["mean"] for name in QUANTITIES if name in summary}
        log_metrics(
            total_elapsed_time=seconds,
            total_gen_tokens=tokens,
            avg_speed=tokens / seconds,
            additional_metrics={**means, "realised_ratio": summary["realised_ratio"]["mean"]},
        )

    @property
    def _is_plain(self) -> bool:
        return self.args.chat_template == "plain"

    @property
    def _look_ahead(self) -> int:
        default = 0 if self.batch_size == 1 else LOOK_AHEAD
        return default if self.args.look_ahead is None else self.args.look_ahead

    @property
    def _prompt_cache_gb(self) -> float:
        default = 0.0 if self.batch_size == 1 else PROMPT_CACHE_GB
        return default if self.args.prompt_cache_gb is None else self.args.prompt_cache_gb

    @property
    def _held(self) -> int:
        """Bytes that are kept for other cells, where the process's memory is counted: they are not a generation's."""
        return self.prepared.nbytes if self.model.device.type == "cpu" else 0

    @property
    def _watches_tower(self) -> bool:
        tokens = make_policy(self.cell.method, self.cell.ratio, self.cell.budget, **self.cell.options).tokens
        return tokens is not None and tokens.sees == "tower"

    @functools.cached_property
    def _decoder(self) -> Any:
        """A tokenizer for this thread alone, where another thread tokenises: they must not share one."""
        return copy.deepcopy(self.tokenizer) if self._look_ahead else self.tokenizer

    def _own_progress_bar(self, total: int) -> tqdm:
        return tqdm(total=total, desc=self._label, disable=self.rank != 0)

    @property
    def _label(self) -> str:
        kept = f"budget {self.cell.budget}" if self.cell.budget else f"{self.cell.ratio or 1:g}"
        return f"{self.cell.method} {kept}"


def _cut(text: str, until: list[str]) -> str:
    """The text up to the first of the stop strings."""
    for stop in until:
        if stop:
            text = text.split(stop, 1)[0]
    return text
