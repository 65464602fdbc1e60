"""Model inputs, vision features and prefills of batches, which all methods share.

Each is computed once and stored for the other cells of a grid, within a memory budget; vision features also for other
questions about the same images and videos. A time to first token always includes the vision tower and the prefill; if
they are reused, it includes the seconds that they took when they ran."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import TypeVar

import torch
from lmms_eval.api.instance import Instance
from loguru import logger
from transformers import BatchFeature

from kvcompress.hooks.shared_prompt import PromptPass

from .kept_tokens import Shown
from .media import ChatPrompt
from .prompts import DoNotBatch, Shapes
from .reduced_inputs import TokensOf
from .vision_tower import Encoded, tensor_bytes

Answer = TypeVar("Answer")
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
        reduction: what is done to the inputs, see `Chosen.identity`.
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
        if kept.prompt_pass is None and prompt_pass is not None and prompt_pass.nbytes <= self.prompt_room:
            kept.prompt_pass = prompt_pass
            self.prompt_room -= prompt_pass.nbytes


Parts = list[tuple[list[int], Batch]]  # batches, each with the indices of its requests


@cache
def say_in_parts(task: str) -> None:
    """Warn once per task that its questions cannot share a batch."""
    logger.warning(f"{task}: the processor cannot batch images or clips of different shapes; using smaller batches")


def parts_of(requests: list[Instance], prepare: Callable[..., Batch]) -> Parts:
    """Prepare the requests as one batch, or as one batch per shape if the processor cannot mix shapes."""
    places = list(range(len(requests)))
    try:
        return [(places, prepare(requests))]
    except DoNotBatch as error:
        say_in_parts(requests[0].args[4])
        alike: dict[Shapes, list[int]] = {}
        for place, shapes in zip(places, error.shapes, strict=True):
            alike.setdefault(shapes, []).append(place)
        return [(part, prepare([requests[place] for place in part])) for part in alike.values()]


def one_batch(requests: list[Instance], prepare: Callable[..., Batch]) -> Batch:
    """Prepare a batch of this size to try whether it fits in memory; if shapes cannot mix, repeat the first request."""
    try:
        return prepare(requests, may_recall=False)
    except DoNotBatch:
        return prepare(requests[:1] * len(requests), may_recall=False)


def in_order(places: list[list[int]], answers: list[list[Answer]]) -> list[Answer]:
    """Merge the answers to a batch's parts in the order of its requests; `places` holds each part's indices."""
    by_place = dict(zip(chain.from_iterable(places), chain.from_iterable(answers), strict=True))
    return [by_place[place] for place in range(len(by_place))]
