"""One line recommends fixed shapes if a decode step is bound by launches on CUDA, and only then."""

import copy
from dataclasses import replace

import pytest
from loguru import logger

from kvcompress.bench.pretended.device import PretendedCuda
from kvcompress.measure import Measurement
from lmms_eval_plugins.model import answering
from lmms_eval_plugins.model.advice import decoded_with, static_advice
from lmms_eval_plugins.model.arguments import make_compression
from tests.support.checkpoints import load_lm, requests
from tests.support.families import FAMILIES

SHORT = Measurement(0.1, 0.01, [90, 90], [8, 8], [0, 0], 10**6, 10**6, 0, [[1.0, 1.0]], 0)
LONG = replace(SHORT, kv_bytes_prompt=10**12)


@pytest.fixture
def on_cuda():
    with PretendedCuda():
        yield copy.deepcopy(FAMILIES["qwen2"].build()).to("cuda")


def advice(model, measured=SHORT, method="snapkv", **options) -> str | None:
    return static_advice(model, make_compression(method, None if method == "full" else 0.2, None, **options), measured)


@pytest.mark.parametrize("method", ["full", "snapkv", "adakv"])
def test_a_small_model_on_cuda_is_recommended_fixed_shapes(on_cuda, method):
    line = advice(on_cuda, method=method)
    assert "cache_implementation=static" in line
    assert line.startswith("2 rows, ")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("measured", "options"),
    [
        (LONG, {}),
        (replace(SHORT, tpot_s=None), {}),
        (SHORT, {"cache_implementation": "static"}),
        (SHORT, {"cache_implementation": "quantized", "kv_backend": "turboquant"}),
        (SHORT, {"decode_budget": 20}),
        (SHORT, {"prefill_chunk": 20}),
    ],
    ids=["long cache", "one token", "static", "quantized", "decode budget", "chunks"],
)
def test_nothing_is_recommended_where_it_would_not_help_or_not_go(on_cuda, measured, options):
    assert advice(on_cuda, measured, **options) is None


def test_nothing_is_recommended_on_a_cpu():
    assert advice(FAMILIES["qwen2"].build()) is None


def test_a_step_reads_the_layers_and_the_logits_and_no_embeddings():
    model = FAMILIES["llava-onevision"].build()
    layers, weights = decoded_with(model)
    text = model.model.language_model
    assert layers == len(text.layers)
    parts = [*text.layers.parameters(), *text.norm.parameters(), *model.lm_head.parameters()]
    assert weights == sum(part.nbytes for part in parts)


def test_a_run_says_it_once(checkpoint, monkeypatch):
    monkeypatch.setattr(answering, "static_advice", lambda *of: "use static")
    lm, said = load_lm(checkpoint("llava-onevision"), max_new_tokens=2), []
    handler = logger.add(lambda message: said.append(message.record["message"]), level="WARNING")
    try:
        lm.generate_until(requests(lm, [{"text": "hello"}, {"text": "and again"}]))
        lm.set_cell("snapkv", 0.5)
        lm.generate_until(requests(lm, [{"text": "hello"}]))
    finally:
        logger.remove(handler)
    assert said.count("use static") == 1
