"""What a generation gives, and whether another gives the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

import kvcompress
from tests.support.calibrations import calibration_of


class Answer(NamedTuple):
    """tokens: prompt and answer, (batch, columns); logits: of the answer, (new, batch, vocabulary)."""

    tokens: torch.Tensor
    logits: torch.Tensor
    cache: kvcompress.CompressedCache


def answer(
    model: torch.nn.Module,
    inputs: dict,
    method: str | None = None,
    ratio: float | None = None,
    new: int = 4,
    **options: object,
) -> Answer:
    """Generate `new` tokens greedily, as an application would; `options` are those of `compress`."""
    with kvcompress.compress(model, method, ratio, **options, **calibration_of(method, model)) as session:
        output = model.generate(
            **inputs, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    return Answer(output.sequences, torch.stack(output.logits), session.cache)


@contextmanager
def attending_by(model: torch.nn.Module, implementation: str | dict[str, str]) -> Iterator[None]:
    """Inside, a model that has `sdpa` attends by another of transformers' implementations."""
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def assert_same(ours: Answer, expected: Answer, tolerance: float = 0.0) -> None:
    """Raise AssertionError if tokens, bytes or kept entries differ, or logits by more than `tolerance`."""
    assert torch.equal(ours.tokens, expected.tokens)
    torch.testing.assert_close(ours.logits, expected.logits, atol=tolerance, rtol=0)
    assert ours.cache.nbytes == expected.cache.nbytes
    assert ours.cache.realised_ratios() == expected.cache.realised_ratios()
    for layer in ours.cache.compressed_layers:
        kept, wanted = (cache.kept_indices(layer.layer_idx) for cache in (ours.cache, expected.cache))
        for row, wanted_row in zip(kept, wanted, strict=True):
            assert all(map(torch.equal, row, wanted_row))
