"""Tokens and logits of the same requests alone, through `generate`, and in flight."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

import kvcompress
from kvcompress.check.reference import Force, generate
from tests.support.calibrations import calibration_of
from tests.support.families import FIRST_TEXT, VOCAB_SIZE

Outcome = list[tuple[torch.Tensor, torch.Tensor]]  # of each request: tokens (new,), logits (new, vocabulary)


def with_end(inputs, tokens, seed=1):
    """Replace the last `tokens` tokens, as far as they are text, by other text."""
    ids = inputs["input_ids"].clone()
    end = ids[:, -tokens:]
    drawn = torch.randint(FIRST_TEXT, VOCAB_SIZE, end.shape, generator=torch.Generator().manual_seed(seed))
    is_text = (end >= FIRST_TEXT) & inputs["attention_mask"][:, -tokens:].bool()
    is_text = is_text.flip(1).cumprod(1).flip(1).bool()
    ids[:, -tokens:] = torch.where(is_text, drawn, end)
    return {**inputs, "input_ids": ids}


def tokens_alone(
    model: torch.nn.Module,
    inputs: dict,
    method: str = "snapkv",
    ratio: float | None = 0.3,
    session_options: dict | None = None,
    **options: object,
) -> list[int]:
    """The tokens that `generate` gives a request by itself; `options` are those of `generate`."""
    with kvcompress.compress(model, method, ratio, **(session_options or {}), **calibration_of(method, model)):
        return model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()


class OutOfMemory:
    """Raises in some calls as if memory ran out: `failing(function)` counts its calls.

    Attributes:
        calls: calls so far.
    """

    def __init__(self, *at: int):
        """`at` are the calls that fail, counted from 1."""
        self.at, self.calls = at, 0

    def failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls in self.at:
                raise torch.OutOfMemoryError("no more")
            return function(*args, **kwargs)

        return call


class Recorder(LogitsProcessor):
    """Records the logits."""

    def __init__(self) -> None:
        self.noted: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.noted.append(scores[0].clone())
        return scores


def alone(
    model: torch.nn.Module, requests: Sequence[dict], new: Sequence[int], method: str, **options: object
) -> Outcome:
    """Answer each request by itself, greedily, with `new[i]` tokens."""
    outcome = []
    for inputs, count in zip(requests, new, strict=True):
        with kvcompress.compress(model, method, max_new_tokens=count + 1, **options):
            tokens, logits = generate(model, inputs, count)
        outcome.append((tokens[0], logits[0]))
    return outcome


def in_flight(
    model: torch.nn.Module,
    requests: Sequence[dict],
    expected: Outcome,
    method: str,
    slots: int,
    prefill_tokens: int | None = None,
    **options: object,
) -> Outcome:
    """Answer all requests, `slots` at a time, forcing each to generate its expected tokens."""
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
        for answer in session.generate_many(asked, slots=slots, prefill_tokens=prefill_tokens, do_sample=False):
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
    prefill_tokens: int | Sequence[int | None] | None = None,
    prefix_cache: kvcompress.PrefixCache | None = None,
    **options: object,
) -> None:
    """Raise AssertionError if a request's logits in flight differ from those alone.

    `prefill_tokens` (where there are several, each in turn) and `prefix_cache` apply in flight."""
    options = calibration_of(options.get("scorer", method), model) | options
    expected = alone(model, requests, new, method, **options)
    options |= {"prefix_cache": prefix_cache}
    for pieces in prefill_tokens if isinstance(prefill_tokens, Sequence) else [prefill_tokens]:
        found = in_flight(model, requests, expected, method, slots, pieces, **options)
        for (tokens, logits), (expected_tokens, expected_logits) in zip(found, expected, strict=True):
            assert torch.equal(tokens.cpu(), expected_tokens.cpu())
            torch.testing.assert_close(logits.cpu(), expected_logits.cpu(), atol=tolerance, rtol=0)
