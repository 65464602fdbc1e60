"""An lmms-eval model that replays recorded answers, so that they can be scored without running the model."""

from collections import defaultdict, deque
from typing import Any

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts

from .answerer import Answerer, question
from .arguments import ModelArguments


class AnsweredLM(Answerer):
    """Answers each question with the `answer` of its measurement rows, in order.

    Args:
        rows: the rows of all processes, as `KVCompressLM.gather_rows` returns them.
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
        """Return all rows; every process has them already."""
        return self.rows

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
