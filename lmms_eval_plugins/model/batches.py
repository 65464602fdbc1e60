"""Model inputs, vision features and prefills of batches, which all methods share.

Each is computed once and stored for the other cells of a grid, within a memory budget; vision features also for other
questions about the same images and videos. A time to first token always includes the vision tower and the prefill; if
they are reused, it includes the seconds that they took when they ran."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

import torch
from transformers import BatchFeature

from kvcompress.hooks.shared_prompt import PromptPass

from .kept_tokens import Shown
from .prompts import ChatPrompt
from .reduced_inputs import TokensOf
from .vision_tower import Encoded, tensor_bytes

Item, Result = TypeVar("Item"), TypeVar("Result")
# Outputs of the vision tower by call: ("image", 0) is the first `get_image_features`.
EncodedCalls = dict[tuple[str, int], Encoded]


@dataclass
class Batch:
    """A batch of prompts, ready for `generate`.

    Attributes:
        key: digest of the prompts and of what is done to their inputs; equal keys mean equal inputs.
        inputs: the processor's output, on the CPU, with floats in the model's precision.
        shows: for each row, a digest of its images and videos, empty if it has none.
        prompt_pass: the stored prefill; None if there is none.
        prompts: the prompts as read, in the order of the rows; empty in a stored batch.
        media: the numbers of images and videos of each row; counted from `prompts` by default.
        whole: for each row, the tokens that its pictures are shrunk or left out from; None if nothing is.
        reduction: what is done to the inputs, see `Compression.identity`.
        shown: row -> the part of its overlay that no method changes, filled on first use; shared with the stored batch.
    """

    key: bytes
    inputs: BatchFeature
    shows: list[bytes] = field(default_factory=list)
    prompt_pass: PromptPass | None = None
    prompts: list[ChatPrompt] = field(default_factory=list)
    media: list[tuple[int, int]] = field(default_factory=list)
    whole: list[TokensOf | None] = field(default_factory=list)
    reduction: bytes = b""
    shown: dict[int, Shown] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.media = self.media or [(len(prompt.images), len(prompt.videos)) for prompt in self.prompts]
        self.whole = self.whole or [None] * len(self.media)

    @property
    def features(self) -> bytes:
        """Digest of the images and videos as the model sees them; equal digests mean equal vision features."""
        return b"".join([*self.shows, self.reduction]) if any(self.shows) else self.key

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return tensor_bytes(dict(self.inputs))


class BatchStore:
    """Stores prepared batches by key, up to a number of bytes.

    The cells of a grid ask the same questions in the same order. So the first batches stay and those that no longer
    fit are not stored: dropping the oldest would drop each batch just before it is needed again.
    """

    def __init__(self, budget: int, prompt_budget: int = 0):
        """`budget`: bytes for inputs and vision features; `prompt_budget`: bytes for prefills. 0 stores nothing."""
        self.budget, self.prompt_budget = budget, prompt_budget
        self.room, self.prompt_room = budget, prompt_budget  # bytes still free
        self._batches: dict[bytes, Batch] = {}
        self._encoded: dict[bytes, EncodedCalls] = {}
        self._tasks: frozenset[str] = frozenset()

    def begin(self, tasks: Iterable[str]) -> bool:
        """Prepare for questions of these tasks; if the tasks have changed, drop all stored batches and return True."""
        tasks = frozenset(tasks)
        if self._tasks == tasks:
            return False
        self._tasks, self._batches, self._encoded = tasks, {}, {}
        self.room, self.prompt_room = self.budget, self.prompt_budget
        return True

    @property
    def nbytes(self) -> int:
        return self.budget - self.room + self.prompt_budget - self.prompt_room

    def get(self, key: bytes) -> Batch | None:
        return self._batches.get(key)

    def encoded(self, batch: Batch) -> EncodedCalls:
        """Return the stored vision features of the images and videos that a batch shows."""
        return dict(self._encoded.get(batch.features, {}))

    def keep_encoded(self, batch: Batch, encoded: EncodedCalls) -> None:
        """Store vision features on the CPU, if there is room."""
        known = self._encoded.setdefault(batch.features, {})
        new = {call: each for call, each in encoded.items() if call not in known}
        size = sum(tensor_bytes(each.output) for each in new.values())
        if size <= self.room:
            cpu = torch.device("cpu")
            known.update({call: replace(each, output=each.to(cpu)) for call, each in new.items()})
            self.room -= size

    def keep(self, batch: Batch, prompt_pass: PromptPass | None = None) -> None:
        """Store a batch and its prefill, each if there is room."""
        if batch.key not in self._batches:
            if batch.nbytes > self.room:
                return
            self._batches[batch.key] = replace(batch, prompts=[])
            self.room -= batch.nbytes
        kept = self._batches[batch.key]
        if prompt_pass is None or prompt_pass is kept.prompt_pass:
            return
        known = 0 if kept.prompt_pass is None else kept.prompt_pass.nbytes  # one without hidden states
        if known < prompt_pass.nbytes <= self.prompt_room + known:
            kept.prompt_pass = prompt_pass
            self.prompt_room -= prompt_pass.nbytes - known


@contextmanager
def ahead(function: Callable[[Item], Result], items: Iterable[Item], depth: int) -> Iterator[Iterator[Result]]:
    """Compute `map(function, items)` in one background thread, at most `depth` results ahead of the consumer.

    Results and exceptions come in the order of `map`. Leaving the context waits for the running call and starts no
    other. A depth of 0 is `map` itself.
    """
    if depth == 0:
        yield map(function, items)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="look-ahead") as thread:
        try:
            yield _in_order(thread, function, iter(items), depth)
        finally:
            thread.shutdown(cancel_futures=True)


def _in_order(
    thread: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterator[Item], depth: int
) -> Iterator[Result]:
    waiting = deque(thread.submit(function, item) for item in islice(items, depth))
    while waiting:
        result = waiting.popleft().result()
        waiting.extend(thread.submit(function, item) for item in islice(items, 1))
        yield result
