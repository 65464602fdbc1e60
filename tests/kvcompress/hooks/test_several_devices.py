"""A model over two GPUs (`device_map`), which are pretended: it answers as on a CPU, and no layer's states meet those
of another device."""

import copy

import pytest
import torch
from accelerate import dispatch_model

import kvcompress
from kvcompress import device
from kvcompress.bench.pretended.device import PretendedCuda
from kvcompress.check.reference import generate
from tests.support.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore:CUDA reports that you have 2 available devices")
EVICTING = {"decode_budget": 12, "decode_interval": 2}


@pytest.fixture
def two_gpus(monkeypatch):
    """Without Triton, whose kernels run only in the interpreter."""
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    device._has_triton.cache_clear()
    with PretendedCuda(devices=2):
        yield
    device._has_triton.cache_clear()


def over_two_gpus(model: torch.nn.Module, rotary: int = 0) -> torch.nn.Module:
    """The first decoder layer and all that is no layer on one, the other two layers on the other; the rotary embedding
    on the one with the number `rotary`."""
    sees = hasattr(model.model, "visual")
    decoder = "model.language_model" if sees else "model"
    places = {f"{decoder}.embed_tokens": 0, f"{decoder}.norm": 0, f"{decoder}.rotary_emb": rotary, "lm_head": 0}
    places |= {f"{decoder}.layers.{layer}": min(layer, 1) for layer in range(3)} | ({"model.visual": 0} if sees else {})
    return dispatch_model(copy.deepcopy(model), places, main_device=0)


@pytest.mark.parametrize(
    ("family", "method", "options", "rotary"),
    [
        ("qwen2", "adakv", EVICTING, 0),
        ("qwen2", "expected-attention", {"prefill_chunk": 16, **EVICTING}, 0),
        ("qwen2", "expected-attention", EVICTING, 1),
        ("qwen2-vl", "fastv", {}, 0),
        ("qwen2-vl", "sparsevlm", {}, 0),
    ],
)
def test_a_padded_batch_is_answered_as_on_one_device(family, method, options, rotary, two_gpus):
    made = FAMILIES[family]
    model = made.build()
    inputs = made.inputs(model, [40, 23], [1, 0] if made.is_vlm else None)
    with kvcompress.compress(model, method, 0.5, **options):
        tokens, expected = generate(model, inputs, 4)
    spread = over_two_gpus(model, rotary)
    there = {name: part.to("cuda:0") for name, part in inputs.items()}
    with kvcompress.compress(spread, method, 0.5, **options) as session:
        _, logits = generate(spread, there, 4, tokens.to("cuda:0"))
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=0)
    devices = [layer.storage.read()[0].device.index for layer in session.cache.compressed_layers]
    assert devices == [0, 1, 1]


def test_requests_in_flight_are_answered_as_on_one_device(two_gpus):
    made = FAMILIES["qwen2"]
    model, answers = made.build(), []
    requests = [made.inputs(model, [length], seed=length) for length in (30, 21)]
    for each, where in ((model, "cpu"), (over_two_gpus(model), "cuda:0")):
        there = [{name: part.to(where) for name, part in request.items()} for request in requests]
        with kvcompress.compress(each, "expected-attention", 0.5, **EVICTING) as session:
            run = session.generate_many(there, slots=2, max_new_tokens=4, do_sample=False)
            answers.append([answer.tokens.tolist() for answer in sorted(run, key=lambda answer: answer.index)])
    assert answers[0] == answers[1]
    assert all(answers[0])
