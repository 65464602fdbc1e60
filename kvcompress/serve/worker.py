"""`Worker`: the thread that owns the model and answers jobs in flight."""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..hooks.session import Session
from ..inflight import Answer, InFlight, Request

MOST_ERRORS = 3
BROKEN = getattr(torch, "AcceleratorError", ())  # an error of the device, after which it computes nothing more


@dataclass(eq=False)
class Job:
    """A request to the worker, which calls `on_tokens` in its own thread, and `on_end` in any.

    Attributes:
        inputs: model inputs of one prompt.
        options: options of `generate`.
        seed: as in `Request`.
        on_tokens: as in `Request`.
        on_end: called once with the answer; with None if the job was cancelled before it had a slot, if its run ended
            with an `error`, or if the worker is closed.
        is_cancelled: whether nobody waits for the answer any more.
        error: what ended the run that this job was in.
    """

    inputs: Mapping[str, torch.Tensor]
    options: dict[str, Any]
    seed: int | None
    on_tokens: Callable[[list[int]], bool]
    on_end: Callable[[Answer | None], None]
    is_cancelled: bool = False
    error: Exception | None = None

    def ends_after(self, tokens: list[int]) -> bool:
        """Hand on the tokens so far; return True if the answer ends here."""
        return self.is_cancelled or self.on_tokens(tokens)


@dataclass
class Worker:
    """Answers jobs in flight. Jobs are given from any thread.

    An error of a run is that of the jobs in it; with the next job another begins. One that has answered nothing since
    the last `MOST_ERRORS` ends the worker.

    Attributes:
        session: creates the compression, which the worker's thread enters.
        settings: arguments of `Session.generate_many` but for the requests.
        error: what ended the worker, None while it works.
        is_closing: whether it takes no more jobs.
    """

    session: Callable[[], AbstractContextManager]
    settings: Mapping[str, Any]
    error: BaseException | None = None
    is_closing: bool = False
    _errors: int = 0  # since the last answer
    _waiting: deque[Job] = field(default_factory=deque)
    _taken: dict[int, Job] = field(default_factory=dict)  # by index in the run
    _run: InFlight | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="kvcompress-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all jobs, and take no more. The thread ends with the next token."""
        with self._changed:
            self.is_closing = True
            left = [*self._taken.values(), *self._waiting]
            self._taken.clear()
            self._waiting.clear()
            self._changed.notify()
        for job in left:
            job.is_cancelled = True
            job.on_end(None)

    def stop(self) -> None:
        """Close, and wait until the thread has ended."""
        self.close()
        self._thread.join()

    def submit(self, job: Job) -> None:
        with self._changed:
            is_over = self.is_closing or self.error is not None
            if not is_over:
                self._waiting.append(job)
                self._changed.notify()
        if is_over:
            job.on_end(None)

    def cancel(self, job: Job) -> None:
        """Take back a job: one that waits leaves the queue, one that runs ends with the next token or piece of its
        prompt."""
        job.is_cancelled = True
        with self._changed:
            is_waiting = job in self._waiting
            if is_waiting:
                self._waiting.remove(job)
        if is_waiting:
            job.on_end(None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._taken)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all slots."""
        run = self._run
        return 0 if run is None else run.kv_bytes

    def _work(self) -> None:
        while self.error is None and self._wait():
            try:
                with self.session() as session:
                    while self._wait():
                        self._answer(session)
            except BaseException as error:
                traceback.print_exc()
                self._run, self._errors = None, self._errors + 1
                if self._errors == MOST_ERRORS or not isinstance(error, Exception):
                    self.error = error
                else:
                    self._fail(error)
        self.close()

    def _answer(self, session: Session) -> None:
        """Answer the jobs that wait, and those that come meanwhile."""
        self._run = session.generate_many(_Arrivals(self), **self.settings)
        for answer in self._run:
            with self._changed:
                job = self._taken.pop(answer.index, None)
            if job is not None:  # else the worker was closed
                job.on_end(answer)
            if isinstance(answer.error, BROKEN):
                raise answer.error
            self._errors = 0
        self._run = None

    def _fail(self, error: Exception) -> None:
        """End the jobs of a run that is over."""
        with self._changed:
            taken = [*self._taken.values()]
            self._taken.clear()
        for job in taken:
            job.error = error
            job.on_end(None)

    def _wait(self) -> bool:
        """Wait for a job; return False to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_closing)
            return bool(self._waiting)


class _Arrivals:
    """The requests of a run, first come first served: the iterator stops while none waits, and may go on later."""

    def __init__(self, worker: Worker):
        self._worker, self._index = worker, 0

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        worker = self._worker
        with worker._changed:
            if not worker._waiting:
                raise StopIteration
            job = worker._taken[self._index] = worker._waiting.popleft()
        self._index += 1
        return Request(job.inputs, job.options, job.seed, job.ends_after, lambda: not job.is_cancelled)
