"""Quantized weights under a compressed cache, and where weights go while they are loaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from kvcompress import KVCompressError, compress
from lmms_eval_plugins import evaluate, weights
from lmms_eval_plugins.arguments import TINY_CHECKPOINT, parse_arguments
from lmms_eval_plugins.command_line import parse
from lmms_eval_plugins.model import KVCompressLM
from tests.masked_reference import generate, only_attending_to

from .checkpoints import image, requests, save_checkpoint

# What runs on a CPU; the packages of all but quanto are an extra.
PACKAGES = {"quanto-int8": "optimum.quanto", "torchao-int8": "torchao", "bnb-int8": "bitsandbytes"}
PACKAGES |= {"quanto-int4": "optimum.quanto", "bnb-int4": "bitsandbytes"}
RATIO = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint("llava-onevision", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=PACKAGES)
def quantized(request, folder):
    """A tiny LLaVA-OneVision in few bits."""
    pytest.importorskip(PACKAGES[request.param])
    cell = {"method": "snapkv", "ratio": RATIO, "window_size": 8}
    return KVCompressLM(
        pretrained=folder, device="cpu", dtype="float32", max_new_tokens=6, quantization=request.param, **cell
    )


def decoder_layer(lm: KVCompressLM) -> torch.nn.Module:
    return lm.model.model.language_model.layers[0]


def test_weights_are_quantized(quantized):
    """Not those of the head, nor the cache."""
    assert type(decoder_layer(quantized).mlp.up_proj.weight) is not torch.nn.Parameter
    assert type(quantized.model.lm_head.weight) is torch.nn.Parameter
    assert quantized.model.get_input_embeddings().weight.dtype == torch.float32


def test_a_compressed_answer_keeps_the_budget(quantized):
    quantized.reset_rows()
    docs = [{"text": "what number is on the blue sign?", "images": [image(5, 192, 192)]}]
    (answer,) = quantized.generate_until(requests(quantized, docs))
    (row,) = quantized.rows
    wanted = round(RATIO * row["tokens_in"]) / row["tokens_in"]
    assert answer.text
    assert row["realised_ratio"] == pytest.approx([wanted] * len(row["realised_ratio"]))


def test_decoding_equals_the_full_cache_under_a_mask_that_hides_what_was_dropped(quantized):
    inputs = {"input_ids": torch.randint(20, 300, (1, 40), generator=torch.Generator().manual_seed(0))}
    model = quantized.model
    with compress(model, "snapkv", RATIO, window_size=8) as session:
        tokens, logits = generate(model, inputs, 5)
    kept = [session.cache.kept_indices(layer) for layer in range(len(session.cache.layers))]
    assert {len(columns) for heads in kept for columns in heads[0]} == {12 + 4}  # of 40, and what was decoded
    with only_attending_to(model, kept):
        _, expected = generate(model, inputs, 5, forced=tokens)
    # bitsandbytes multiplies 4-bit weights in bfloat16 on a CPU.
    tolerance = 0.1 if quantized.args.quantization == "bnb-int4" else 1e-3
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)


def test_criticalkv_which_reads_a_weight_says_that_it_cannot(quantized):
    with (
        pytest.raises(KVCompressError, match="unquantized o_proj"),
        compress(quantized.model, "criticalkv", RATIO),
    ):
        quantized.model.generate(input_ids=torch.full((1, 40), 30), max_new_tokens=2)


def test_the_setting_is_in_a_cells_folder_and_fingerprint():
    argv = ["tiny_textvqa", "tiny", "snapkv", "0.2", "--limit", "2", "quantization=quanto-int8"]
    request = parse(argv)
    arguments, ((cell, options),) = evaluate.check_arguments(request)
    assert arguments.quantization == "quanto-int8"
    assert cell.folder(Path()).name == "snapkv-0.2-limit=2-quantization=quanto-int8"
    assert evaluate.fingerprint(cell, arguments, options, {})["settings"]["quantization"] == "quanto-int8"


def test_an_unknown_quantization_names_the_valid_ones():
    with pytest.raises(KVCompressError, match=r"quantization='int8'.*quanto-int8.*bnb-int4"):
        parse_arguments(pretrained="tiny", quantization="int8")


@pytest.mark.parametrize("name", ["quanto-int8", "torchao-int8", "bnb-int4"])
def test_a_missing_package_is_one_line_that_says_how_to_get_it(monkeypatch, name):
    package, _ = weights.PACKAGES[name.split("-")[0]]
    monkeypatch.setitem(weights.PACKAGES, name.split("-")[0], (package, lambda: False))
    with pytest.raises(KVCompressError, match=f"^quantization='{name}' needs.*pip install {package}$"):
        KVCompressLM(pretrained="tiny", device="cpu", quantization=name)


def test_torchao_int4_without_a_gpu_names_what_runs():
    pytest.importorskip("torchao")
    with pytest.raises(KVCompressError, match=r"CUDA GPU.*here: cpu, bfloat16.*quanto-int4"):
        weights.quantization_config("torchao-int4", "cpu", "bfloat16")


def checkpoint_that_says(folder, **quantization) -> str:
    shutil.copytree(TINY_CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return str(folder)


@pytest.mark.parametrize(
    ("quantization", "needed"),
    [({"quant_method": "gptq", "bits": 4}, "optimum"), ({"quant_method": "awq", "bits": 4}, "gptqmodel")],
)
def test_a_quantized_checkpoint_without_its_package_is_one_line(tmp_path, quantization, needed):
    """These packages are compiled where they are installed; they are in no extra."""
    folder = checkpoint_that_says(tmp_path / "m", **quantization)
    with pytest.raises(
        KVCompressError, match=f"is quantized .{quantization['quant_method']}.*needs: pip install {needed}"
    ):
        KVCompressLM(pretrained=folder, device="cpu")


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path):
    folder = checkpoint_that_says(tmp_path / "m", quant_method="gptq", bits=4)
    with pytest.raises(KVCompressError, match=r"quantized already.*gptq"):
        KVCompressLM(pretrained=folder, device="cpu", quantization="quanto-int8")


def test_tensor_parallel_needs_several_processes():
    with pytest.raises(KVCompressError, match="tp_plan='auto' needs several processes: NUM_PROCESSES=2"):
        KVCompressLM(pretrained="tiny", device="cpu", tp_plan="auto")
