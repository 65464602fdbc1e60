"""A model that lmms-eval asks, as the evaluation of a cell sees it."""

from collections.abc import Callable
from typing import Any

from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms

from .arguments import ModelArguments
from .generation import NO_LIKELIHOOD


class Answerer(lmms):
    """What the evaluation of a cell needs of a model that lmms-eval asks.

    Attributes:
        args: the model arguments.
        rows: one measurement per counted request.
        when_answered: called when every request of an evaluation is answered, before lmms-eval scores the answers.
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
        """The rows of all ranks, the same list on each, sorted by task and document. All ranks must call it."""
        raise NotImplementedError

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError(f"--model kvcompress answers generate_until tasks only: {NO_LIKELIHOOD}")

    def clean(self) -> None:
        """lmms-eval calls this when all is answered, to free the model. It stays: one model serves several evaluations.
        See `KVCompressLM.unload`."""
        self.when_answered()


def question(request: Instance) -> tuple[str, int]:
    """Its task, and its number there."""
    _, _, _, doc_id, task, _ = request.args
    return task, doc_id
