"""How many requests a model answers together: as the arguments say, or with `auto` as many as fit into memory."""

from collections.abc import Callable, Iterable

from lmms_eval.api.instance import Instance
from lmms_eval.utils import Collator

from kvcompress.inflight.loop import Limits

from .answer_store import AnswerStore, key_of
from .answering import Answering
from .arguments import ModelArguments
from .batch_size import MOST, MOST_SLOTS, largest_batch, room_for_a_batch, searches
from .batches import Batch, one_batch
from .generation import Generation


class Sizes:
    """Finds the sizes for one loaded model.

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
        key = (task, doc_id, self._answering.compression.chosen.identity)
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
            step = -(-len(alike) // searches(size))
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
        if store is not None and store.knows(key):
            return store.get(key)
        kwargs = self._wanted(requests[0]).arguments
        size = largest_batch(
            lambda rows: self._answering.try_batch(one_batch(requests[:rows], self._prepare), kwargs),
            room=room_for_a_batch(device),
            most=min(len(requests), self._args.max_batch_size or MOST),
            may_fail=device.type == "cuda",
        )
        if store is not None:
            store.put(key, size)
        return size

    def limits(self, requests: list[Instance]) -> Limits:
        """Return how many of these requests, longest first, may decode together."""
        on_oom, most = "halve" if self._args.on_oom_in_force == "halve_batch" else "raise", len(requests)
        if self._args.slots != "auto":
            return Limits(min(self._args.slots, most), None, on_oom, self._args.prefill_tokens)
        kwargs = self._wanted(requests[0]).arguments
        one = self._answering.try_batch(self._prepare(requests[:1], may_recall=False), kwargs)
        left = 0 if one is None else room_for_a_batch(self._answering.model.device) - one
        return Limits(1, None, on_oom) if left <= 0 else Limits(min(MOST_SLOTS, most), left / 2**30, on_oom)
