"""The lmms-eval models that a cell can be evaluated with: their interface, and one that replays recorded answers."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms

from .arguments import ModelArguments
from .generation import NO_LIKELIHOOD
from .ranks import of_each_rank


class Answerer(lmms):
    """Base class of the lmms-eval models that a cell can be evaluated with.

    Attributes:
        args: the model arguments.
        rows: one measurement row per counted request.
        when_answered: called once all requests of an evaluation are answered, before lmms-eval scores the answers.
    """

    is_simple = False
    args: ModelArguments

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.when_answered: Callable[[], None] = lambda: None

    @property
    def batch_size(self) -> int | str:
        return self.args.batch_size

    def reset_rows(self) -> None:
        self.rows = []

    def gather_rows(self) -> list[dict[str, Any]]:
        """Return the rows of all ranks, sorted by task and document: the same list on each. All ranks must call it."""
        return in_order(chain.from_iterable(self._of_each_rank(self.rows)))

    def _of_each_rank(self, value: Any) -> list[Any]:
        return of_each_rank(value) if self.world_size > 1 else [value]  # the ranks of tp_plan are one model

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError(f"--model kvcompress answers generate_until tasks only: {NO_LIKELIHOOD}")

    def clean(self) -> None:
        """Signal that all requests are answered. lmms-eval calls this to free the model, but the model stays loaded for
        the next evaluation; `KVCompressLM.unload` frees it."""
        self.when_answered()


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["task"], row["doc_id"]))


def question(request: Instance) -> tuple[str, int]:
    """Return a request's task and its document's number in that task."""
    _, _, _, doc_id, task, _ = request.args
    return task, doc_id


class AnsweredLM(Answerer):
    """Scores without a model: answers each question with the `answer` of its measurement rows, in order.

    Args:
        rows: the rows of all processes, as `gather_rows` returned them; every process has all.
    """

    def __init__(self, args: ModelArguments, rows: list[dict[str, Any]]):
        super().__init__()
        self.args, self.rows = args, rows
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        self.device = self.accelerator.device
        self._waiting: dict[tuple[str, int], deque[dict[str, Any]]] = defaultdict(deque)
        for row in rows:
            self._waiting[row["task"], row["doc_id"]].append(row)

    def gather_rows(self) -> list[dict[str, Any]]:
        return in_order(self.rows)  # already those of all ranks

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        results = []
        for request in requests:
            if request.metadata.get("__padding_only__"):
                results.append(GenerationResult(text=""))
                continue
            row = self._waiting[question(request)].popleft()
            counts = TokenCounts(input_tokens=row["tokens_in"], output_tokens=row["tokens_out"])
            results.append(GenerationResult(text=row["answer"], token_counts=counts))
        return results

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        results = []
        for request in requests:
            waiting, answers = self._waiting[question(request)], []
            is_padding = request.metadata.get("__padding_only__")
            while not is_padding and waiting and waiting[0]["round"] == len(answers):
                answers.append(waiting.popleft()["answer"])
            results.append(answers or [""])
        return results
