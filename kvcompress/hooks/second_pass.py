"""The second pass of a method that reads a prompt twice or answers it first, and its results, which may be shared."""

import time
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..cache.layer import CompressedLayer
from ..device import device_of, synchronise
from .answer_first import answer_first
from .second_reading import DecoderInputs, read_again


class Result(NamedTuple):
    """What a second pass found, by layer and in CPU memory.

    Attributes:
        received: the score of each candidate, (batch, kv_heads, candidates).
        answer_scores: as in `Memory`; None if the prompt was read again.
        seconds: of the pass.
    """

    received: list[torch.Tensor]
    answer_scores: list[torch.Tensor | None]
    seconds: float


Results = dict[object, Result]


class SecondPass:
    """One prompt's second pass, which waits for its first to end.

    Attributes:
        saved_s: seconds to add to get the time of a pass that runs and notes nothing.
    """

    def __init__(self, inputs: DecoderInputs, results: Results | None = None):
        """`inputs` are those of the first pass; `results`, shared by generations of the same prompt, is added to."""
        self.inputs, self.results, self.saved_s = inputs, results, 0.0

    @classmethod
    def watch(cls, decoder: PreTrainedModel, cache: CompressedCache) -> RemovableHandle:
        """Let a prompt's pass through `decoder` set `cache.second_pass`, until the returned handle is removed."""

        def take(inputs: DecoderInputs) -> None:
            cache.second_pass = cls(inputs)

        return DecoderInputs.watch(decoder, take)

    def run(
        self, model: PreTrainedModel, decoder: PreTrainedModel, logits: torch.Tensor | None, cache: CompressedCache
    ) -> None:
        """Let every layer score its entries; `logits` (batch, columns, vocabulary) are the first pass's."""
        waiting = [layer for layer in cache.compressed_layers if layer.waiting is not None]
        if not waiting:
            return
        if self.results is None:
            self._run(model, decoder, logits, cache)
            return
        key, start = _key(cache, waiting[0]), _now(model)
        if (known := self.results.get(key)) is not None:
            for layer, received, scores in zip(waiting, known.received, known.answer_scores, strict=True):
                layer.waiting.receive(received.to(layer.device, copy=True))
                layer.memory.answer_scores = None if scores is None else scores.to(layer.device, copy=True)
            self.saved_s = known.seconds - (_now(model) - start)
            return
        self._run(model, decoder, logits, cache)
        end = _now(model)
        self.results[key] = Result(
            [_noted(layer.waiting.candidates.view.received) for layer in waiting],
            [_noted(layer.memory.answer_scores) for layer in waiting],
            end - start,
        )
        self.saved_s = end - _now(model)

    def _run(
        self, model: PreTrainedModel, decoder: PreTrainedModel, logits: torch.Tensor | None, cache: CompressedCache
    ) -> None:
        if cache.policy.cluster.second_pass == "context":
            read_again(decoder, self.inputs, cache)
        else:
            answer_first(model, decoder, self.inputs, logits, cache)


def _key(cache: CompressedCache, first: CompressedLayer) -> object:
    """Return all that a second pass over one prompt depends on: the method and the candidates, but no budget."""
    source = first.waiting.candidates.source
    return cache.policy.cluster, None if source is None else source.cpu().numpy().tobytes()


def _noted(states: torch.Tensor | None) -> torch.Tensor | None:
    return None if states is None else states.to("cpu", copy=True)


def _now(model: PreTrainedModel) -> float:
    synchronise(device_of(model))
    return time.perf_counter()
