"""Quantized weights under a compressed cache, and where weights go while they are loaded."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcompress import KVCompressError, compress
from kvcompress.check.reference import generate, only_attending_to
from kvcompress.hooks.model import text_decoder
from lmms_eval_plugins.cells.identity import fingerprint
from lmms_eval_plugins.cells.plan import Plan
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.model import loading
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT
from lmms_eval_plugins.model.lm import KVCompressLM
from tests.support.checkpoints import image, requests, save_checkpoint
from tests.support.examples import some

# What runs on a CPU; the packages of all but quanto are an extra.
PACKAGES = {"quanto-int8": "optimum.quanto", "torchao-int8": "torchao", "bnb-int8": "bitsandbytes"}
PACKAGES |= {"quanto-int4": "optimum.quanto", "bnb-int4": "bitsandbytes"}
RATIO = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint("llava-onevision", tmp_path_factory.mktemp("checkpoint"))


# quanto compiles a C++ extension for four bits, which takes longer than all of this on a machine that has none yet.
@pytest.fixture(scope="module", params=some(PACKAGES, [name for name in PACKAGES if name != "quanto-int4"]))
def quantized(request, folder):
    """A tiny LLaVA-OneVision in few bits."""
    pytest.importorskip(PACKAGES[request.param])
    cell = {"method": "snapkv", "ratio": RATIO, "window_size": 8}
    return KVCompressLM(
        pretrained=folder, device="cpu", dtype="float32", max_new_tokens=6, quantization=request.param, **cell
    )


def decoder_layer(lm: KVCompressLM) -> torch.nn.Module:
    return text_decoder(lm.model).layers[0]


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
    plan = Plan.of(request)
    arguments, ((cell, options),) = plan.arguments, plan.cells
    assert arguments.quantization == "quanto-int8"
    assert cell.folder(Path()).name == "snapkv-0.2-limit=2-quantization=quanto-int8"
    assert fingerprint(cell, arguments, options, {}, {})["settings"]["quantization"] == "quanto-int8"


@pytest.mark.parametrize("name", ["quanto-int8", "torchao-int8", "bnb-int4"])
def test_a_missing_package_is_one_line_that_says_how_to_get_it(monkeypatch, name):
    package, _ = loading.PACKAGES[name.split("-")[0]]
    monkeypatch.setitem(loading.PACKAGES, name.split("-")[0], (package, lambda: False))
    with pytest.raises(KVCompressError, match=f"^quantization='{name}' needs.*pip install {package}$"):
        KVCompressLM(pretrained="tiny", device="cpu", quantization=name)


def test_torchao_int4_without_a_gpu_names_what_runs():
    pytest.importorskip("torchao")
    with pytest.raises(KVCompressError, match=r"CUDA GPU.*here: cpu, bfloat16.*quanto-int4"):
        loading.quantization_config("torchao-int4", "cpu", "bfloat16")


def checkpoint_that_says(folder, **quantization) -> str:
    shutil.copytree(TINY_CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return str(folder)


@pytest.mark.parametrize(
    ("quantization", "needed"),
    [({"quant_method": "gptq", "bits": 4}, "optimum"), ({"quant_method": "awq", "bits": 4}, "gptqmodel")],
)
@pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is not None, reason="gptqmodel is installed")
def test_a_quantized_checkpoint_without_its_package_is_one_line(tmp_path, quantization, needed):
    folder = checkpoint_that_says(tmp_path / "m", **quantization)
    with pytest.raises(KVCompressError, match=f"is quantized .{quantization['quant_method']}.*pip install {needed}"):
        KVCompressLM(pretrained=folder, device="cpu")


GROUP = 32  # numbers that share a scale
CHECKPOINTS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def packed(numbers: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Every eight 4-bit numbers along `dim` in one int32, the first of `order` lowest."""
    eight = numbers.long().movedim(dim, -1).unflatten(-1, (-1, 8))[..., order]
    return (eight << torch.arange(0, 32, 4)).sum(-1).to(torch.int32).movedim(-1, dim).contiguous()


def quantize_files(folder: Path, method: str) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint's linear layers in the layout of GPTQ or AWQ, rounded to nearest; return the dequantized
    weights.

    A weight (out, in) is (number - zero) * scale, with a scale and a zero per group of inputs."""
    tensors, written, meant = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            written[name] = tensor
            continue
        layer, groups = name.removesuffix(".weight"), tensor.T.unflatten(0, (-1, GROUP))  # (groups, GROUP, out)
        least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale = ((most - least) / 15).half().float()
        zero = (-least / scale).round().clamp(1, 15)
        numbers = ((groups / scale).round() + zero).clamp(0, 15)
        meant[name] = ((numbers - zero) * scale).flatten(0, 1).T
        numbers, scale, zero = numbers.flatten(0, 1), scale[:, 0], zero[:, 0]
        written[f"{layer}.scales"] = scale.half()
        if method == "gptq":  # along the inputs; zeros are stored less one
            written[f"{layer}.qweight"], written[f"{layer}.qzeros"] = packed(numbers, 0), packed(zero - 1, 1)
            written[f"{layer}.g_idx"] = torch.arange(len(numbers), dtype=torch.int32) // GROUP
        else:
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            written[f"{layer}.qweight"], written[f"{layer}.qzeros"] = packed(numbers, 1, order), packed(zero, 1, order)
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": CHECKPOINTS[method]}))
    return meant


@pytest.mark.slow
@pytest.mark.parametrize("method", CHECKPOINTS)
def test_a_quantized_checkpoint_keeps_and_answers_what_its_weights_say(tmp_path, method):
    """The reference is the same model with the file's weights dequantized to float32."""
    pytest.importorskip("gptqmodel")
    cell = {"method": "snapkv", "ratio": RATIO, "window_size": 4, "device": "cpu", "dtype": "float32"}
    folder = Path(save_checkpoint("llama", tmp_path))
    reference = KVCompressLM(pretrained=str(folder), **cell)
    meant = quantize_files(folder, method)
    reference.model.load_state_dict(meant, strict=False)
    quantized = KVCompressLM(pretrained=str(folder), **cell)
    assert not isinstance(decoder_layer(quantized).mlp.up_proj, torch.nn.Linear)
    inputs = {"input_ids": torch.randint(20, 100, (1, 40), generator=torch.Generator().manual_seed(0))}
    results = []
    for lm in (quantized, reference):
        with compress(lm.model, "snapkv", RATIO, window_size=4) as session:
            tokens, logits = generate(lm.model, inputs, 5)
        results.append((tokens.tolist(), logits, [head.tolist() for head in session.cache.kept_indices(0)[0]]))
    (ours, our_logits, our_kept), (expected, expected_logits, expected_kept) = results
    assert ours == expected
    assert our_kept == expected_kept
    torch.testing.assert_close(our_logits, expected_logits, atol=0.05, rtol=0)  # its kernel rounds differently


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path):
    folder = checkpoint_that_says(tmp_path / "m", quant_method="gptq", bits=4)
    with pytest.raises(KVCompressError, match=r"already quantized.*gptq"):
        KVCompressLM(pretrained=folder, device="cpu", quantization="quanto-int8")
