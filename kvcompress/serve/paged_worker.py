"""`PagedWorker`: answers text in the compressed pages of transformers' continuous batching."""

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from ..errors import KVCompressError
from ..inflight import Answer
from ..paged.session import PagedSession
from .worker import Job

POLL_S = 0.1  # between two looks at whether transformers' thread has ended
TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}  # inputs of a prompt without media


@dataclass
class _Answering:
    """A job whose answer has these tokens so far, the first and the last at these times."""

    job: Job
    tokens_in: int
    tokens: list[int] = field(default_factory=list)
    first_at: float = 0.0
    last_at: float = 0.0

    def ends_with(self, tokens: list[int]) -> bool:
        """Take the tokens so far; return True if the job wants no more."""
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        self.tokens = tokens
        return self.job.ends_after(tokens)

    def answer(self, index: int, kept: float) -> Answer:
        further = len(self.tokens) - 1
        tpot_s = (self.last_at - self.first_at) / further if further else None
        tokens = torch.tensor(self.tokens)
        return Answer(index, tokens, tpot_s=tpot_s, tokens_in=self.tokens_in, realised_ratios=[kept])


@dataclass
class PagedWorker:
    """Answers jobs of text greedily; like `Worker`, but transformers schedules them.

    An error within transformers' thread ends all jobs and the worker, since that thread does not start again.

    Attributes:
        session: creates the compression.
        greedy: how tokens are chosen, and the most of an answer.
        pages: their size and number.
        error: what ended the worker, None while it works.
        is_closing: whether it takes no more jobs.
    """

    session: Callable[[], PagedSession]
    greedy: GenerationConfig
    pages: ContinuousBatchingConfig
    error: BaseException | None = None
    is_closing: bool = False
    _count: int = 0
    _under_way: dict[str, _Answering] = field(default_factory=dict)  # by transformers' name of the request
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        self._session = self.session().__enter__()
        self._manager = self._session.model.init_continuous_batching(self.greedy, self.pages)
        with torch.inference_mode():
            self._manager.start()
        while self._manager.batch_processor is None and self._manager.is_running():  # its thread makes the pages
            time.sleep(0.01)
        if self._fatal is not None:
            self._session.__exit__()
            raise self._fatal
        self._thread = threading.Thread(target=self._work, name="kvcompress-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all jobs, and take no more."""
        with self._lock:
            self.is_closing = True
        for answering in self._taken():
            answering.job.is_cancelled = True
            answering.job.on_end(None)

    def stop(self) -> None:
        """Close, and wait until transformers' thread has ended."""
        self.close()
        self._session.__exit__()
        self._thread.join()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises KVCompressError for one that pages cannot hold."""
        if job.options.get("do_sample"):
            raise KVCompressError("answers in pages (--pages-gb) are greedy: leave temperature out")
        if not TEXT.issuperset(job.inputs):
            raise KVCompressError("pages (--pages-gb) hold text only: they take no images")
        prompt, new = job.inputs["input_ids"][0].tolist(), job.options["max_new_tokens"]
        with self._lock:
            name = None
            if not self.is_closing and self.error is None:
                self._session.check_room(len(prompt), new)
                self._count += 1
                name = str(self._count)
                self._under_way[name] = _Answering(job, len(prompt))
        if name is None:
            job.on_end(None)
        elif self._manager.add_request(prompt, name, max_new_tokens=new, streaming=True) is None:
            self._end(name, None)  # its thread has just ended

    def cancel(self, job: Job) -> None:
        """Take back a job: its pages are free after the step under way."""
        job.is_cancelled = True
        with self._lock:
            name = next((name for name, answering in self._under_way.items() if answering.job is job), None)
        if name is not None:
            self._manager.cancel_request(name)
            self._end(name, None)

    @property
    def waiting(self) -> int:
        return len(self._under_way) - self.running

    @property
    def running(self) -> int:
        """The jobs that have pages."""
        return len(self._session.requests & self._under_way.keys())

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages in use."""
        return self._session.kv_bytes

    @property
    def _fatal(self) -> BaseException | None:
        """What has ended transformers' thread."""
        return self._manager.background_thread_status.fatal_error

    def _work(self) -> None:
        try:
            while not self.is_closing:
                output = self._manager.get_result(timeout=POLL_S)
                if output is not None:
                    self._take(output)
                elif not (self._manager.is_running() or self.is_closing):
                    raise RuntimeError(f"transformers' continuous batching has ended: {self._fatal}")
        except BaseException as error:
            traceback.print_exc()
            self.error = error
            for answering in self._taken():
                answering.job.error = error
                answering.job.on_end(None)

    def _take(self, output: Any) -> None:
        """Hand on a request's tokens so far."""
        name = output.request_id
        with self._lock:
            answering = self._under_way.get(name)
        if answering is None:  # cancelled, perhaps before its thread knew of it
            if not output.is_finished():
                self._manager.cancel_request(name)
            return
        if output.error is not None:
            answering.job.error = RuntimeError(output.error)
            self._end(name, None)
            return
        wants_no_more = answering.ends_with(output.generated_tokens)
        if wants_no_more and not output.is_finished():
            self._manager.cancel_request(name)
        if wants_no_more or output.is_finished():
            kept = self._session.policy.budget(answering.tokens_in) / answering.tokens_in
            self._end(name, answering.answer(int(name), kept))

    def _end(self, name: str, answer: Answer | None) -> None:
        """End a request, unless another thread just did."""
        with self._lock:
            answering = self._under_way.pop(name, None)
        if answering is not None:
            answering.job.on_end(answer)

    def _taken(self) -> list[_Answering]:
        """Return the jobs under way, which are then no longer."""
        with self._lock:
            taken = [*self._under_way.values()]
            self._under_way.clear()
        return taken
