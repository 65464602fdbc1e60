"""The measurements of an answer, and the advice that comes of them."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from loguru import logger

from kvcompress.bench.pretended.device import PretendedCuda
from kvcompress.measure import Measurement
from lmms_eval_plugins.model import answering
from lmms_eval_plugins.model.answering import Answering, Answers, decoded_with, static_advice
from lmms_eval_plugins.model.arguments import make_compression
from lmms_eval_plugins.model.batches import Batch
from tests.support.checkpoints import load_lm, requests
from tests.support.families import FAMILIES


@pytest.mark.parametrize(("device", "held"), [("cpu", 1000), ("meta", 0)])
def test_what_is_kept_for_other_cells_is_told_from_a_generations_memory_where_the_process_is_measured(device, held):
    model = SimpleNamespace(device=torch.device(device))
    assert Answering(model, None, SimpleNamespace(nbytes=1000), None).held == held


def test_a_row_of_a_batch_has_its_own_counts_and_its_share_of_the_bytes():
    """Two rows of three beams each, on a model of one layer."""
    measured = SimpleNamespace(
        ttft_s=0.5, tpot_s=0.1, tokens_in=[7, 8], tokens_out=[2, 3], vision_tokens=[0, 4], kv_bytes_prompt=100,
        kv_bytes_end=120, kv_room_bytes=30, peak_memory_bytes=999, realised_ratios=[[0.1, 0.1, 0.1, 0.2, 0.2, 0.2]],
    )  # fmt: skip
    tower, prompt = SimpleNamespace(seconds=0.25, is_known=True), SimpleNamespace(is_known=False, prompt_pass=None)
    answers = Answers(["a", "b"], 3.0, measured, tower, prompt, inputs={}, kept=None)
    request = SimpleNamespace(args=("?", None, {}, 5, "task", "test"))
    batch = Batch(b"", {}, [b"", b"\x0a"], media=[(0, 0), (2, 1)])
    row = answers.row(request, batch, 1)
    expected = {
        "task": "task", "doc_id": 5, "split": "test", "batch_size": 2, "ttft_s": 0.5, "vision_s": 0.25,
        "vision_is_known": True, "prompt_is_known": False, "tpot_s": 0.1, "tokens_in": 8, "tokens_out": 3,
        "vision_tokens": 4, "kv_bytes_prompt": 50, "kv_bytes_end": 60, "kv_room_bytes": 15, "realised_ratio": [0.2],
        "images": 2, "videos": 1, "share_s": 1.5, "slots": None, "waited_s": None, "peak_kv_bytes": 120,
        "peak_memory_bytes": 999, "reused_tokens": None, "shows": "0a",
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    of_none = replace(answers, reused_tokens=0)  # a prefix cache that knew nothing of it
    assert of_none.row(request, batch, 1) == {**row, "reused_tokens": 0}
    spared = replace(answers, reused_tokens=11)
    unknown = dict.fromkeys(("ttft_s", "peak_memory_bytes"))
    assert spared.row(request, batch, 1) == {**row, "reused_tokens": 5, **unknown}
    in_flight = replace(spared, waited_s=0.5, slots=4, run_kv_bytes=130, is_spared=True)
    of_slot = {"tpot_s": None, "slots": 4, "waited_s": 0.5, "peak_kv_bytes": 130}
    assert in_flight.row(request, batch, 1) == {**row, "reused_tokens": 5, **unknown, **of_slot}


# -- fixed shapes are recommended if a decode step is bound by launches on CUDA, and only then


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
