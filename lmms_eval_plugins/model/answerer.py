"""The interface of an lmms-eval model that the evaluation of a cell uses."""

from collections.abc import Callable
from typing import Any

from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms

from .arguments import ModelArguments
from .generation import NO_LIKELIHOOD


class Answerer(lmms):
    """Base class of the lmms-eval models that a cell can be evaluated with.

    Attributes:
        args: the model arguments.
        rows: one measurement row per counted request.
        when_answered: called once all requests of an evaluation are answered, before lmms-eval scores the answers.
    """

    is_simple = False
    args: ModelArguments
    rows: list[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.when_answered: Callable[[], None] = lambda: None

    @property
    def batch_size(self) -> int | str:
        return self.args.batch_size

    def gather_rows(self) -> list[dict[str, Any]]:
        """Return the rows of all ranks, sorted by task and document: the same list on each. All ranks must call it."""
        raise NotImplementedError

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError(f"--model kvcompress answers generate_until tasks only: {NO_LIKELIHOOD}")

    def clean(self) -> None:
        """Signal that all requests are answered. lmms-eval calls this to free the model, but the model stays loaded for
        the next evaluation; `KVCompressLM.unload` frees it."""
        self.when_answered()


def question(request: Instance) -> tuple[str, int]:
    """Return a request's task and its document's number in that task."""
    _, _, _, doc_id, task, _ = request.args
    return task, doc_id
