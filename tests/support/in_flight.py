"""The same requests alone, through `generate`, and in flight: their tokens and logits."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList

import kvcompress
from kvcompress.check.reference import Force, generate
from tests.support.calibrations import calibration_of

Outcome = list[tuple[torch.Tensor, torch.Tensor]]  # of each request: tokens (new,), logits (new, vocabulary)


class Recorder(LogitsProcessor):
    """Notes the logits."""

    def __init__(self) -> None:
        self.noted: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.noted.append(scores[0].clone())
        return scores


def alone(
    model: torch.nn.Module, requests: Sequence[dict], new: Sequence[int], method: str, **options: object
) -> Outcome:
    """Each request by itself, greedy, with `new[i]` tokens."""
    outcome = []
    for inputs, count in zip(requests, new, strict=True):
        with kvcompress.compress(model, method, max_new_tokens=count + 1, **options):
            tokens, logits = generate(model, inputs, count)
        outcome.append((tokens[0], logits[0]))
    return outcome


def in_flight(
    model: torch.nn.Module, requests: Sequence[dict], expected: Outcome, method: str, slots: int, **options: object
) -> Outcome:
    """All of them, `slots` at a time, each made to write the tokens that are expected of it."""
    recorders, asked = [Recorder() for _ in requests], []
    for inputs, recorder, (tokens, _) in zip(requests, recorders, expected, strict=True):
        force = Force(inputs["input_ids"].shape[1], tokens[None])
        asked.append(
            kvcompress.Request(
                inputs, {"max_new_tokens": len(tokens), "logits_processor": LogitsProcessorList([recorder, force])}
            )
        )
    answers = {}
    with kvcompress.compress(model, method, max_new_tokens=64, **options) as session:
        for answer in session.generate_many(asked, slots=slots, do_sample=False):
            if answer.error is not None:
                raise answer.error
            answers[answer.index] = answer.tokens
    return [(answers[i], torch.stack(recorder.noted)) for i, recorder in enumerate(recorders)]


def check_in_flight(
    model: torch.nn.Module,
    requests: Sequence[dict],
    new: Sequence[int],
    method: str,
    slots: int,
    tolerance: float = 2e-4,
    **options: object,
) -> None:
    """Raises AssertionError where a request's logits are others in flight than alone."""
    options = calibration_of(options.get("scorer", method), model) | options
    expected = alone(model, requests, new, method, **options)
    found = in_flight(model, requests, expected, method, slots, **options)
    for (tokens, logits), (expected_tokens, expected_logits) in zip(found, expected, strict=True):
        assert torch.equal(tokens.cpu(), expected_tokens.cpu())
        torch.testing.assert_close(logits.cpu(), expected_logits.cpu(), atol=tolerance, rtol=0)
