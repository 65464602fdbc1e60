"""What is the same under every method: a batch's model inputs, what the vision tower makes of them, the prefill.

All is computed once and kept, as far as a budget of memory goes, for the other cells of a grid. A time to first token
always holds the seconds of the tower and of the pass: where they were kept, those of the time when they ran.
"""

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
from .vision_tower import Encoded, tensor_bytes

Answer = TypeVar("Answer")


@dataclass
class Batch:
    """A batch of prompts, ready for `generate`.

    Attributes:
        key: digest of the prompts; equal keys have equal inputs.
        inputs: what the processor made of them, on the CPU, floats in the model's precision.
        encoded: by call, ("image", 0) for the first of `get_image_features`: what the vision tower gave, on the CPU;
            empty before it ran, or where that did not fit into memory.
        prompt_pass: the same of the prefill; None as long as there is none.
        prompts: what was read, in the order of the rows; a kept batch has none.
        media: how many images and videos each row shows; counted of `prompts` where it is not given.
        shown: row -> what its overlays show whatever is kept, once one was asked for; shared with the kept batch.
    """

    key: bytes
    inputs: BatchFeature
    encoded: dict[tuple[str, int], Encoded] = field(default_factory=dict)
    prompt_pass: PromptPass | None = None
    prompts: list[ChatPrompt] = field(default_factory=list)
    media: list[tuple[int, int]] = field(default_factory=list)
    shown: dict[int, Shown] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.media = self.media or [(len(prompt.images), len(prompt.videos)) for prompt in self.prompts]

    @property
    def nbytes(self) -> int:
        """Without the prefill."""
        return tensor_bytes(dict(self.inputs)) + sum(tensor_bytes(each.output) for each in self.encoded.values())


class BatchStore:
    """Prepared batches by key, up to a number of bytes.

    A grid walks through the same questions again and again. So what came first is kept and what does not fit is
    not: a store that dropped the oldest would drop each batch just before its turn.
    """

    def __init__(self, budget: int, prompt_budget: int = 0):
        """`budget`: bytes, 0 keeps nothing; `prompt_budget`: further ones, for prefills."""
        self.budget, self.prompt_budget = budget, prompt_budget
        self.room, self.prompt_room = budget, prompt_budget  # what is left of them
        self._batches: dict[bytes, Batch] = {}
        self._tasks: frozenset[str] = frozenset()

    def begin(self, tasks: Iterable[str]) -> bool:
        """Questions of these tasks come next: those of others are forgotten. Returns whether they were."""
        tasks = frozenset(tasks)
        if self._tasks == tasks:
            return False
        self._tasks, self._batches = tasks, {}
        self.room, self.prompt_room = self.budget, self.prompt_budget
        return True

    @property
    def nbytes(self) -> int:
        return self.budget - self.room + self.prompt_budget - self.prompt_room

    def get(self, key: bytes) -> Batch | None:
        return self._batches.get(key)

    def keep(
        self, batch: Batch, encoded: dict[tuple[str, int], Encoded], prompt_pass: PromptPass | None = None
    ) -> None:
        """Keep a batch, what the vision tower gave for it and its prefill, where there is room."""
        if batch.key not in self._batches:
            if batch.nbytes > self.room:
                return
            self._batches[batch.key] = replace(batch, prompts=[])
            self.room -= batch.nbytes
        kept = self._batches[batch.key]
        if kept.prompt_pass is None and prompt_pass is not None and prompt_pass.nbytes <= self.prompt_room:
            kept.prompt_pass = prompt_pass
            self.prompt_room -= prompt_pass.nbytes
        known = kept.encoded
        new = {call: each for call, each in encoded.items() if call not in known}
        size = sum(tensor_bytes(each.output) for each in new.values())
        if size <= self.room:
            cpu = torch.device("cpu")
            known.update({call: replace(each, output=each.to(cpu)) for call, each in new.items()})
            self.room -= size


Parts = list[tuple[list[int], Batch]]  # batches, each with the places of its requests


@cache
def say_in_parts(task: str) -> None:
    """Say once that the questions of a task do not go into one batch."""
    logger.warning(f"{task}: the processor takes clips or pictures of different shapes in smaller batches only")


def parts_of(requests: list[Instance], prepare: Callable[..., Batch]) -> Parts:
    """The requests as one batch; or where the processor does not take their clips or pictures together, those of one
    shape as one."""
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
    """A batch of so many, to see whether it fits into memory: where they do not go into one, all like the first."""
    try:
        return prepare(requests, may_recall=False)
    except DoNotBatch:
        return prepare(requests[:1] * len(requests), may_recall=False)


def in_order(places: list[list[int]], answers: list[list[Answer]]) -> list[Answer]:
    """The answers to the parts of a batch, as its requests stand; `places` are those of each part."""
    by_place = dict(zip(chain.from_iterable(places), chain.from_iterable(answers), strict=True))
    return [by_place[place] for place in range(len(by_place))]
