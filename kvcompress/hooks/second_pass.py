"""The second pass of a method that reads a prompt twice or answers it first, and its results, which may be shared."""

from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..device import device_of, now
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
        saved_s: seconds to add to get the time of a pass that runs and records nothing.
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
        layers = cache.compressed_layers
        if layers[0].waiting is None:  # then none waits: all of the prompt is kept
            return
        if self.results is None:
            self._run(model, decoder, logits, cache)
            return
        key, device = _key(cache), device_of(model)
        start = now(device)
        if (known := self.results.get(key)) is not None:
            for layer, received, scores in zip(layers, known.received, known.answer_scores, strict=True):
                layer.waiting.receive(received.to(layer.device, copy=True))
                layer.memory.answer_scores = None if scores is None else scores.to(layer.device, copy=True)
            self.saved_s = known.seconds - (now(device) - start)
            return
        self._run(model, decoder, logits, cache)
        end = now(device)
        self.results[key] = Result(
            [_to_host(layer.waiting.candidates.view.received) for layer in layers],
            [_to_host(layer.memory.answer_scores) for layer in layers],
            end - start,
        )
        self.saved_s = end - now(device)

    def _run(
        self, model: PreTrainedModel, decoder: PreTrainedModel, logits: torch.Tensor | None, cache: CompressedCache
    ) -> None:
        if cache.policy.cluster.second_pass == "context":
            read_again(decoder, self.inputs, cache)
        else:
            answer_first(model, decoder, self.inputs, logits, cache)


def _key(cache: CompressedCache) -> object:
    """Return all that a second pass over one prompt depends on: the method and the candidates, but no budget."""
    source = cache.compressed_layers[0].waiting.candidates.source
    return cache.policy.cluster, None if source is None else source.cpu().numpy().tobytes()


def _to_host(states: torch.Tensor | None) -> torch.Tensor | None:
    return None if states is None else states.to("cpu", copy=True)
