"""Calibration files: their contents, and which are rejected."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import kvcompress
from kvcompress import KVCompressError
from kvcompress.calibration import files
from kvcompress.calibration.command import main
from kvcompress.methods import method_info
from tests.support.calibrations import calibration_file, text_prompts
from tests.support.families import FAMILIES
from tests.support.kept import kept_of

MODEL = FAMILIES["qwen2"].build()


def kept(method: str, **options: object) -> list[list[int]]:
    """The columns that MODEL keeps of a prompt, of each layer's heads."""
    with kvcompress.compress(MODEL, method, 0.3, **options) as session:
        MODEL(**FAMILIES["qwen2"].inputs(MODEL, [40]))
    return [head.tolist() for layer in kept_of(session.cache) for head in layer[0]]


def test_what_is_saved_is_loaded_and_the_metadata_says_what_it_is(tmp_path):
    made = kvcompress.calibrate(MODEL, "q-filters", text_prompts(MODEL), "random text", 7, recent=3)
    files.save(made, path := tmp_path / "new" / "q.safetensors")
    loaded = files.load(path)
    assert dataclasses.replace(loaded, tensors={}) == dataclasses.replace(made, tensors={})
    assert torch.equal(loaded.tensors["filters"], made.tensors["filters"])
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["kvcompress_calibration"] == "1"
    assert json.loads(metadata["model"])["heads"] == 4
    assert (metadata["data"], metadata["seed"], metadata["prompts"]) == ('"random text"', "7", "3")


def test_a_file_that_is_written_anew_is_read_anew(tmp_path):
    made = kvcompress.calibrate(MODEL, "q-filters", text_prompts(MODEL))
    files.save(made, path := tmp_path / "q.safetensors")
    before = kept("q-filters", calibration=str(path))
    files.save(dataclasses.replace(made, tensors={"filters": -made.tensors["filters"]}), path)
    assert kept("q-filters", calibration=str(path)) != before


def tampered(tmp_path: Path, **changes: object) -> str:
    """A file of MODEL's filters with other metadata, or other tensors."""
    path = tmp_path / "tampered.safetensors"
    with safe_open(calibration_file("q-filters", MODEL), framework="pt") as file:
        tensors, metadata = {"filters": file.get_tensor("filters")}, file.metadata()
    tensors = changes.pop("tensors", tensors)
    kept = {name: text for name, text in (metadata | changes).items() if text is not None}
    save_file(tensors, path, kept)
    return str(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kvcompress_calibration": None}, "is a safetensors file without kvcompress's metadata"),
        ({"kvcompress_calibration": "2"}, "is of format '2': .* writes format '1'"),
        ({"model": "{}"}, "has metadata that cannot be read: .*missing 7 required"),
        ({"model": "no JSON"}, "has metadata that cannot be read"),
        ({"other": "1"}, "has metadata that cannot be read: .*'other'"),
        ({"method": '"triattention"'}, "was made for method 'triattention', not for 'q-filters'"),
        ({"tensors": {"mean": torch.ones(3, 2, 16)}}, "the tensors are mean, not filters"),
        ({"tensors": {"filters": torch.ones(3, 4, 16)}}, r"shape \(3, 4, 16\), not \(3 layers, 2 kv_heads, 16 head"),
        ({"tensors": {"filters": torch.full((3, 2, 16), torch.nan)}}, "numbers that are not finite"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_one_line(tmp_path, changes, message):
    path = tampered(tmp_path, **changes)
    with pytest.raises(KVCompressError, match=message) as error:
        kvcompress.compress(MODEL, "q-filters", 0.3, calibration=path)
    assert "calibration=" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"text", b"\xff" * 100])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KVCompressError, match=r"^calibration=.* cannot be read as a safetensors file"):
        kvcompress.compress(MODEL, "q-filters", 0.3, calibration=str(path))


def test_a_method_that_needs_a_file_says_so_and_how_it_is_made():
    with pytest.raises(KVCompressError, match=r"'q-filters' needs calibration=FILE.*kvcompress calibrate MODEL"):
        kvcompress.compress(MODEL, "q-filters", 0.3)
    with pytest.raises(KVCompressError, match="'adakv' has no option 'calibration'"):
        kvcompress.compress(MODEL, "adakv", 0.3, calibration="x")
    kvcompress.compress(MODEL, "expected-attention", 0.3)  # there it is an option


@pytest.mark.parametrize(
    "other", [FAMILIES["llama"].build(), FAMILIES["qwen2"].build(2), FAMILIES["qwen2"].build(3, 6)]
)
def test_another_models_file_is_refused_at_once(other):
    path = calibration_file("q-filters", MODEL)
    with pytest.raises(KVCompressError, match=r"belongs to another model: it belongs to qwen2 .*, this is "):
        kvcompress.compress(other, "q-filters", 0.3, calibration=path)
    with pytest.raises(KVCompressError, match="belongs to another model"):
        kvcompress.CompressedCache(other.config, "q-filters", 0.3, calibration=path)


def test_statistics_from_a_file_change_what_expected_attention_keeps_and_need_not_be_given():
    file = calibration_file("expected-attention", MODEL)
    assert kept("expected-attention") != kept("expected-attention", calibration=file)


# -- what authors have published


def published(tmp_path: Path) -> dict[str, Path]:
    """Files of the forms in which they are, of MODEL's sizes."""
    q_filters, stats = tmp_path / "qfilt.safetensors", tmp_path / "stats.safetensors"
    save_file({"q_filters": torch.arange(96.0).view(3, 2, 16)}, q_filters)
    save_file({"query_mean": torch.ones(3, 4, 16), "query_cov": torch.ones(3, 4, 16, 16)}, stats)
    gates = tmp_path / "full_attention_heads.tsv"
    gates.write_text("1.0e-01\t-2.0e-04\n9.9e-01\t1.1e+00\n0\t5e-1\n")
    names = [f"layer{layer:02d}_head{head:02d}" for layer in range(3) for head in range(4)]
    of_head = {name: torch.full((8,), float(i)) for i, name in enumerate(("q_mean_real", "q_mean_imag", "q_abs_mean"))}
    torch.save({"metadata": {"head_dim": 16}, "stats": {name: of_head for name in names}}, tmp_path / "tri.pt")
    scores = {f"{layer}-{head}": [0.0, layer + head] for layer in range(3) for head in range(4)}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    found = {
        "q-filters": q_filters,
        "sparsemm": tmp_path / "scores.json",
        "expected-attention": stats,
        "duoattention": gates,
    }
    weights = {f"{layer}-{head}-key": [0.2, layer / 10] for layer in range(3) for head in range(2)}
    (tmp_path / "similarity.json").write_text(json.dumps(weights | {"0-0-value": [0.1]}))
    for part in range(10):
        (tmp_path / f"prefixkv_model_{part / 10}.json").write_text(json.dumps([part / 10, 0.0, part / 5]))
    found |= {"mixkv": tmp_path / "similarity.json", "prefixkv": tmp_path / "prefixkv_model_0.5.json"}
    return found | {"triattention": tmp_path / "tri.pt"}


def test_published_files_are_read_as_what_the_method_wants(tmp_path):
    paths, model = published(tmp_path), files.ModelIdentity.of(MODEL.config, 3)
    for method, path in paths.items():
        cls = method_info(method).cls
        known = cls.from_published(path, model)
        files.check_tensors(known, model, cls.calibrated)
        with pytest.raises(KVCompressError, match="cannot be read as a"):
            cls.from_published(tmp_path / "none", model)
    cls = method_info("duoattention").cls
    expected = torch.tensor([[0.1, 0.0], [0.99, 1.0], [0.0, 0.5]])
    torch.testing.assert_close(cls.from_published(paths["duoattention"], model)["gates"], expected)
    filters = method_info("q-filters").cls.from_published(paths["q-filters"], model)["filters"]
    assert torch.equal(filters, -torch.arange(96.0).view(3, 2, 16))
    scores = method_info("sparsemm").cls.from_published(paths["sparsemm"], model)["scores"]
    assert scores[2, 3] / scores[0, 1] == pytest.approx(5)
    weights = method_info("mixkv").cls.from_published(paths["mixkv"], model)["weights"]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.1], [0.15, 0.15], [0.2, 0.2]]))
    sizes = method_info("prefixkv").cls.from_published(paths["prefixkv"], model)["sizes"]
    torch.testing.assert_close(sizes[0], torch.arange(1, 11) / 10)
    torch.testing.assert_close(sizes[:, 6], torch.tensor([0.7, 1.0, 0.4]))  # 0.3 is forgotten
    mean = method_info("triattention").cls.from_published(paths["triattention"], model)["mean"]
    assert torch.equal(mean[0, 0], torch.tensor([0.0] * 8 + [1.0] * 8))


def test_a_folder_has_a_file_per_method(tmp_path, monkeypatch):
    monkeypatch.setitem(files.BUNDLED, "mine", tmp_path)
    for method in ("q-filters", "triattention"):
        file = calibration_file(method, MODEL)
        shutil.copy(file, tmp_path / f"{method}.safetensors")
        by_folder, by_name, by_file = (kept(method, calibration=given) for given in (str(tmp_path), "mine", file))
        assert by_folder == by_name == by_file
    with pytest.raises(KVCompressError, match=r"calibration='mine': the folder has no duoattention\.safetensors"):
        kvcompress.compress(MODEL, "duoattention", 0.3, calibration="mine")


@pytest.mark.parametrize(
    ("method", "content", "message"),
    [
        ("prefixkv", None, r" is one of 10 files: prefixkv_model_0\.8\.json is not next to it"),
        ("prefixkv", "[1, 2]", "and those next to it do not list layers"),
        ("prefixkv", '{"layers": 3}', "and those next to it do not list layers"),
        ("mixkv", '{"0-0-key": []}', "does not have numbers for 3 layers of 2 heads"),
        ("mixkv", "[1]", "does not have numbers for 3 layers of 2 heads"),
    ],
)
def test_a_published_file_of_another_form_is_one_line(tmp_path, method, content, message):
    paths = published(tmp_path)
    changed = tmp_path / "prefixkv_model_0.8.json" if method == "prefixkv" else paths[method]
    changed.unlink() if content is None else changed.write_text(content)
    with pytest.raises(KVCompressError, match=message) as error:
        method_info(method).cls.from_published(paths[method], files.ModelIdentity.of(MODEL.config, 3))
    assert "\n" not in str(error.value)


def test_the_command_needs_something_to_calibrate_on():
    with pytest.raises(KVCompressError, match="one of the arguments --text --published is required"):
        main(["model", "--method", "duoattention", "--out", "out.safetensors"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (["--text", "none.txt"], "--text 'none.txt' cannot be read: No such file"),
        (["--text", "blank.txt"], "--text 'blank.txt' is empty"),
        (["--text", "out"], "--out 'out' would overwrite the file of --text"),
        (["--published", "./out"], "--out 'out' would overwrite the file of --published"),
    ],
)
def test_a_wrong_file_is_named_before_a_model_is_loaded_and_none_is_overwritten(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("blank.txt").write_text(" \n")
    Path("out").write_text("mine")
    with pytest.raises(KVCompressError, match=f"^{re.escape(message)}"):
        main(["no/such/model", "--method", "duoattention", *source, "--out", "out"])
    assert Path("out").read_text() == "mine"


def test_a_device_that_is_not_there_is_one_line_before_weights_are_loaded(tmp_path):
    MODEL.config.save_pretrained(tmp_path / "model")  # without weights
    (tmp_path / "book.txt").write_text("once upon a time")
    given = ["--method", "q-filters", "--text", str(tmp_path / "book.txt"), "--out", str(tmp_path / "out")]
    with pytest.raises(KVCompressError, match=r"^device 'cuda:77' cannot be used: "):
        main([str(tmp_path / "model"), *given, "--device", "cuda:77"])


def test_the_command_takes_a_published_file_for_a_models_config_alone(tmp_path, capsys):
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    config.save_pretrained(tmp_path / "model")
    gates, out = published(tmp_path)["duoattention"], tmp_path / "out.safetensors"
    main([str(tmp_path / "model"), "--method", "duoattention", "--published", str(gates), "--out", str(out)])
    assert "written: " in capsys.readouterr().out
    config.intermediate_size, config.vocab_size = 32, 128
    with pytest.raises(KVCompressError, match="belongs to another model"):
        kvcompress.compress(LlamaForCausalLM(config), "duoattention", 0.5, calibration=str(out))
    gates.write_text("1\t0\n0\t1\n")
    with pytest.raises(
        KVCompressError, match=r"--published .* does not belong to llama .*: tensor 'gates' has the shape"
    ):
        main([str(tmp_path / "model"), "--method", "duoattention", "--published", str(gates), "--out", str(out)])
