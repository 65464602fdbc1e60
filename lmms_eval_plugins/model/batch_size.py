"""How many requests a model answers together: as the arguments say, or with `auto` as many as fit into memory."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from lmms_eval.api.instance import Instance
from lmms_eval.utils import Collator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcompress.device import release_memory
from kvcompress.hooks.shared_prompt import SharedPrompt
from kvcompress.inflight.loop import Limits

from .answer_store import AnswerStore, key_of
from .answering import Answering, with_few_tokens
from .arguments import ModelArguments
from .batches import Batch
from .generation import Generation
from .prompts import DoNotBatch, on_device
from .vision_tower import VisionTower, tensor_bytes

MOST_SLOTS = 256
MOST = 64  # prompts per batch, unless `max_batch_size` says otherwise
# The share of free memory that a batch may take. On a GPU the size is tried before it is used; on a CPU, other
# processes share the memory, and a process that takes too much is killed.
SHARES = {"cuda": 0.9, "mps": 0.7, "cpu": 0.5}
# A container's memory limit and its memory in use, both in bytes.
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


class PeakOfTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that are created in this context and alive at the same time.

    The process's own memory would say less: it keeps memory that was freed, and a small batch reuses it unnoticed.

    Attributes:
        peak: the largest count so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        known = self._storages.get(storage._cdata)
        if known is not None and not known[0].expired():
            return
        if known is not None:  # a new storage at the address of a freed one
            self._live -= known[1]
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live += storage.nbytes()
        if self._live > self.peak:
            self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
            self._live = sum(size for _, size in self._storages.values())
            self.peak = max(self.peak, self._live)


def largest_batch(try_batch: Callable[[int], int | None], room: int, most: int, may_fail: bool) -> int:
    """Return how many of the longest prompts fit in one batch.

    Batches of one and of two prompts show how many bytes each further prompt takes.

    Args:
        try_batch: answers a batch of the given size and returns its peak bytes, or None if it ran out of memory.
        room: bytes that a batch may take.
        most: the largest number of prompts to return.
        may_fail: whether running out of memory does no harm; the computed size is then tried before it is returned.
    """
    if most == 1 or (one := try_batch(1)) is None or (two := try_batch(2)) is None:
        return 1
    size = min(most, max(1, 1 + (room - one) // max(two - one, 1)))
    if may_fail:
        while size > 2 and try_batch(size) is None:
            size = (size + 2) // 2
    return size


def free_memory(device: torch.device) -> int:
    """Return the bytes free for this process: on the device, or, for a CPU, on the machine or in its container."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = psutil.virtual_memory().available
    for limit, used in CGROUPS:
        if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
            free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)


def room_for_a_batch(device: torch.device) -> int:
    """Return the bytes that a batch may take on `device`."""
    return int(free_memory(device) * SHARES.get(device.type, SHARES["cpu"]))


class Sizes:
    """Finds batch sizes and numbers of slots for one loaded model.

    Attributes:
        found: the sizes found for `batch_size=auto` in the last evaluation, by the index of their first batch.
    """

    def __init__(
        self,
        args: ModelArguments,
        answering: Answering,
        prepare: Callable[..., Batch],
        wanted: Callable[[Instance], Generation],
    ):
        """`prepare` creates the model inputs of requests; `wanted` returns the generation arguments of a request."""
        self._args, self._answering, self._prepare, self._wanted = args, answering, prepare, wanted
        self._tokens: dict[tuple[str, int, bytes], int] = {}  # tokens of each question's prompt, as it is shown
        self.found: dict[int, int] = {}

    def shortness(self, request: Instance) -> int:
        """Return a sort key that puts the longest prompt first: by text, or by tokens if sizes are automatic."""
        if not self._args.fits_itself:
            return -len(request.args[0])
        _, _, _, doc_id, task, _ = request.args
        key = (task, doc_id, self._answering.compression.identity)
        if key not in self._tokens:
            inputs = self._prepare([request], may_recall=False).inputs
            self._tokens[key] = inputs["input_ids"].shape[1]
        return -self._tokens[key]

    def batches(self, order: Collator, store: AnswerStore | None) -> Iterable[list[Instance]]:
        """Split sorted requests into batches. `store` keeps the sizes for later runs."""
        size = self._args.batch_size
        if isinstance(size, int):
            return order.get_batched(n=size)
        self.found, batches = {}, []
        for alike in order.get_batched(n=len(order)):  # same generation arguments
            searches = int(size.partition(":")[2] or 1)  # N of `auto:N`
            step = -(-len(alike) // searches)
            for start in range(0, len(alike), step):
                part = alike[start : start + step]
                rows = self._largest_batch(sorted(part, key=self.shortness), store)
                self.found[len(batches)] = rows
                batches += [part[first : first + rows] for first in range(0, len(part), rows)]
        return batches

    def _largest_batch(self, requests: list[Instance], store: AnswerStore | None) -> int:
        """Return how many of these requests, longest first, fit into a batch.

        An earlier run's size is reused, since its stored answers are those of whole batches."""
        key, device = key_of(requests, b"batch size"), self._answering.model.device
        if store is not None and (known := store.get(key)) is not None:
            return known
        kwargs = self._wanted(requests[0]).arguments
        size = largest_batch(
            lambda rows: self.try_batch(self._one_batch(requests[:rows]), kwargs),
            room=room_for_a_batch(device),
            most=min(len(requests), self._args.max_batch_size or MOST),
            may_fail=device.type == "cuda",
        )
        if store is not None:
            store.put(key, size)
        return size

    def _one_batch(self, requests: list[Instance]) -> Batch:
        """Prepare a batch of this size for a trial; if shapes cannot mix, of the first request repeated."""
        try:
            return self._prepare(requests, may_recall=False)
        except DoNotBatch:
            return self._prepare(requests[:1] * len(requests), may_recall=False)

    def limits(self, requests: list[Instance]) -> Limits:
        """Return how many of these requests, longest first, may decode together."""
        on_oom, most = "halve" if self._args.on_oom_in_force == "halve_batch" else "raise", len(requests)
        if self._args.slots != "auto":
            return Limits(min(self._args.slots, most), None, on_oom, self._args.prefill_tokens)
        kwargs = self._wanted(requests[0]).arguments
        one = self.try_batch(self._prepare(requests[:1], may_recall=False), kwargs)
        left = 0 if one is None else room_for_a_batch(self._answering.model.device) - one
        return Limits(1, None, on_oom) if left <= 0 else Limits(min(MOST_SLOTS, most), left / 2**30, on_oom)

    def try_batch(self, batch: Batch, kwargs: dict[str, Any]) -> int | None:
        """Return the peak bytes of answering a batch, or None if it runs out of memory. It generates a few tokens with
        room for all, stores nothing, and does not count as the cell's warm-up."""
        model, few = self._answering.model, with_few_tokens(kwargs)
        device, on_gpu = model.device, model.device.type == "cuda"
        before = torch.cuda.memory_allocated(device) if on_gpu else -tensor_bytes(dict(batch.inputs))
        try:
            inputs = on_device(batch.inputs, device)
            tower, prompt = VisionTower(model, {}), SharedPrompt(model, room=0)
            with contextlib.nullcontext() if on_gpu else PeakOfTensors() as counted:
                self._answering.generate(inputs, few, tower, prompt, room_for=kwargs["max_new_tokens"])
            return (torch.cuda.max_memory_allocated(device) if on_gpu else counted.peak) - before
        except torch.OutOfMemoryError:
            pass
        # After the `except` block, whose traceback would keep the tensors that did not fit alive.
        release_memory()
        return None
