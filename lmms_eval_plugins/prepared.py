"""What is the same under every method: a batch's model inputs, what the vision tower makes of them, the prompt pass.

All is computed once and kept, as far as a budget of memory goes, for the other cells of a grid. A time to first token
always holds the seconds of the tower and of the pass: where they were kept, those of the time when they ran.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from transformers import BatchFeature, PreTrainedModel
from transformers.utils import ModelOutput

from kvcompress.device import peak_memory, synchronise
from kvcompress.hooks.shared_prompt import PromptPass

from .media import Prompt

Item, Result = TypeVar("Item"), TypeVar("Result")


@dataclass(frozen=True)
class Encoded:
    """What one call of the vision tower gave: `get_image_features` or `get_video_features` of the base model.

    Attributes:
        output: what that returned, without the hidden states that no model reads.
        device: where it was.
        seconds: what the call took.
        peak_memory: most memory up to its end since `generate` began, in bytes; see `kvcompress.measure`.
    """

    output: Any
    device: torch.device
    seconds: float
    peak_memory: int

    def to(self, device: torch.device) -> Any:
        """The output on a device. Lists and dicts are new at each call: beam search writes into them."""
        return map_tensors(lambda tensor: tensor.to(device), self.output)


@dataclass
class Prepared:
    """A batch of prompts, ready for `generate`.

    Attributes:
        key: digest of the prompts; equal keys have equal inputs.
        inputs: what the processor made of them, on the CPU, floats in the model's precision.
        encoded: by call, ("image", 0) for the first of `get_image_features`: what the vision tower gave, on the CPU;
            empty before it ran, or where that did not fit into memory.
        prompt_pass: the same of the prompt pass; None as long as there is none.
        prompts: what was read, in the order of the rows; a kept batch has none.
    """

    key: bytes
    inputs: BatchFeature
    encoded: dict[tuple[str, int], Encoded] = field(default_factory=dict)
    prompt_pass: PromptPass | None = None
    prompts: list[Prompt] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Without the prompt pass."""
        return tensor_bytes(dict(self.inputs)) + sum(tensor_bytes(each.output) for each in self.encoded.values())


class PreparedStore:
    """Prepared batches by key, up to a number of bytes.

    A grid walks through the same questions again and again. So what came first is kept and what does not fit is
    not: a store that dropped the oldest would drop each batch just before its turn.
    """

    def __init__(self, budget: int, prompt_budget: int = 0):
        """`budget`: bytes, 0 keeps nothing; `prompt_budget`: further ones, for prompt passes."""
        self.budget, self.prompt_budget = budget, prompt_budget
        self.room, self.prompt_room = budget, prompt_budget  # what is left of them
        self._batches: dict[bytes, Prepared] = {}
        self._tasks: frozenset[str] = frozenset()

    def begin(self, tasks: Iterable[str]) -> None:
        """Questions of these tasks come next: those of others are forgotten."""
        tasks = frozenset(tasks)
        if self._tasks != tasks:
            self._tasks, self._batches = tasks, {}
            self.room, self.prompt_room = self.budget, self.prompt_budget

    @property
    def nbytes(self) -> int:
        return self.budget - self.room + self.prompt_budget - self.prompt_room

    def get(self, key: bytes) -> Prepared | None:
        return self._batches.get(key)

    def keep(
        self, batch: Prepared, encoded: dict[tuple[str, int], Encoded], prompt_pass: PromptPass | None = None
    ) -> None:
        """Keep a batch, what the vision tower gave for it and its prompt pass, where there is room."""
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


class VisionTower:
    """The calls of a model's vision tower in one generation, timed; answered from `known` where that has them.

    Enter it before `kvcompress.compress(...)`, whose own watches of the tower then still see every call.

    Attributes:
        calls: what each call gave, in order.
        spent_s: seconds that the calls took now.
    """

    def __init__(self, model: PreTrainedModel, known: dict[tuple[str, int], Encoded], held: int = 0):
        """`held`: bytes that are no part of the peak of memory."""
        self.model, self.known, self.held = model.base_model, known, held
        self.calls: dict[tuple[str, int], Encoded] = {}
        self.spent_s = 0.0
        self._is_encoding = False

    @property
    def seconds(self) -> float | None:
        """What the calls took when the tower ran; None where there was none."""
        return sum(each.seconds for each in self.calls.values()) if self.calls else None

    @property
    def correction_s(self) -> float:
        """What must be added to the seconds of a generation to get those of one in which the tower runs."""
        return (self.seconds or 0.0) - self.spent_s

    @property
    def is_known(self) -> bool:
        """Whether the tower did not run, because all of it was known."""
        return bool(self.calls) and self.calls.keys() <= self.known.keys()

    def __enter__(self) -> "VisionTower":
        for modality in ("image", "video"):
            name = f"get_{modality}_features"
            if (encode := getattr(self.model, name, None)) is not None:
                # `generate` reads the signature.
                setattr(self.model, name, functools.wraps(encode)(functools.partial(self._encode, modality, encode)))
        return self

    def __exit__(self, *exception: object) -> None:
        for modality in ("image", "video"):
            vars(self.model).pop(f"get_{modality}_features", None)  # a watch inside may have removed it already

    def _encode(self, modality: str, encode: Callable, *args: Any, **kwargs: Any) -> Any:
        if self._is_encoding:  # Qwen3-VL encodes videos through get_image_features
            return encode(*args, **kwargs)
        call = (modality, sum(name == modality for name, _ in self.calls))
        device = self.model.device
        synchronise(device)
        start = time.perf_counter()
        if call in self.known:
            found = self.known[call]
            output = found.to(found.device)
        else:
            self._is_encoding = True
            try:
                output = without_hidden_states(encode(*args, **kwargs))
            finally:
                self._is_encoding = False
        synchronise(device)
        seconds = time.perf_counter() - start
        self.spent_s += seconds
        if call not in self.known:
            peak = peak_memory(device) - self.held
            found = Encoded(map_tensors(lambda tensor: tensor, output), device, seconds, peak)
        self.calls[call] = found
        return output


def without_hidden_states(output: Any) -> Any:
    """A vision tower's output without what the language model does not read: it would stay in memory for the whole
    generation. Output of another kind is returned as it is."""
    if not isinstance(output, ModelOutput) or output.get("pooler_output") is None:
        return output
    dropped = ("last_hidden_state", "hidden_states", "attentions")
    return type(output)(**{name: value for name, value in output.items() if name not in dropped})


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `function` of every tensor in it; containers are new."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):  # ModelOutput, too
        return type(value)(**{name: map_tensors(function, item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(function, item) for item in value])
    return value


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in `value`."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(tensor_bytes(item) for item in value.values())
    return sum(tensor_bytes(item) for item in value) if isinstance(value, list | tuple) else 0


@contextmanager
def ahead(function: Callable[[Item], Result], items: Iterable[Item], depth: int) -> Iterator[Iterator[Result]]:
    """`map(function, items)`, computed in one background thread, at most `depth` results before they are asked for.

    Order, and where an exception is raised, are those of `map`. Leaving the context waits for the call under way
    and starts no other. A depth of 0 is `map` itself.
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
