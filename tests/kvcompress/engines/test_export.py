"""`kvcompress export`: settings of engines, and the policies that they cannot be told."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from kvcompress import __main__
from kvcompress.calibration import files
from kvcompress.clusters.triattention import TriAttentionKVCluster
from kvcompress.engines import openvino, triattention
from kvcompress.errors import KVCompressError
from kvcompress.policy.make import make_policy
from tests.support.calibrations import calibration_file
from tests.support.families import FAMILIES


def eviction(method: str, ratio: float, tokens: int, block: int = 32, **options: object) -> dict:
    return openvino.export(make_policy(method, ratio, **options), tokens, block).settings["cache_eviction_config"]


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("h2o", {}, {"recent_size": 256, "max_cache_size": 512, "snapkv_window_size": 0}),
        ("h2o", {"recent": 0.1}, {"recent_size": 64}),
        ("snapkv", {}, {"start_size": 32, "recent_size": 32, "max_cache_size": 512, "snapkv_window_size": 32}),
        ("snapkv", {"window_size": 40}, {"recent_size": 64, "snapkv_window_size": 40}),
        ("snapkv", {"variant": "effivlm"}, {"recent_size": 64, "snapkv_window_size": 51}),
        ("snapkv", {"positions": "cache"}, {"apply_rotation": True}),
        ("kvcrush", {"sinks": 40}, {"start_size": 64, "recent_size": 32, "snapkv_window_size": 16}),
        ("kvcrush", {}, {"max_cache_size": 384, "kvcrush_config": {"budget": 4, "anchor_point_mode": "ALTERNATING"}}),
        ("kvcrush", {"anchor": "zeros"}, {"kvcrush_config": {"budget": 4, "anchor_point_mode": "ZEROS"}}),
        ("r-kv", {}, {"aggregation_mode": "ADAPTIVE_RKV", "adaptive_rkv_config": {"window_size": 8}}),
    ],
)
def test_openvino_gets_the_areas_and_the_window_of_a_method(method, options, expected):
    config = eviction(method, 0.25, 2048, **options)
    assert {name: config[name] for name in expected} == expected
    assert all(config[name] % 32 == 0 for name in ("start_size", "recent_size", "max_cache_size"))


def test_the_budget_is_that_of_the_ratio_in_blocks():
    assert eviction("snapkv", 0.1, 2000)["max_cache_size"] == 192  # 200
    assert eviction("snapkv", 0.1, 2000, block=16)["max_cache_size"] == 208
    rounded = openvino.export(make_policy("snapkv", 0.1), 2000)
    assert "the budget of 200 tokens is rounded to 192" in rounded.differences
    assert not any("rounded" in each for each in openvino.export(make_policy("snapkv", 0.25), 2048).differences)


def test_what_a_policy_does_as_the_engine_is_no_difference():
    plain = openvino.export(make_policy("h2o", 0.25), 2048).differences
    alike = openvino.export(make_policy("h2o", 0.25, head_budget="shared", decode_budget=512), 2048).differences
    assert [each[:9] for each in plain if each not in alike] == ["all heads", "decoded t"]


@pytest.mark.parametrize(("ratio", "percent"), [(0.3, 70), (0.333, 67), (0.99, 1)])
def test_openvino_prunes_vision_tokens_by_percent(ratio, percent):
    found = openvino.export(make_policy("cdpruner", ratio), None)
    assert found.settings == {"generation_config": {"pruning_ratio": percent, "relevance_weight": 1.0}}
    assert any("rounded" in each for each in found.differences) == (ratio == 0.333)


WRONG = [
    ("keydiff 0.2 --tokens 999", "has nothing like method 'keydiff'; it has: cdpruner, h2o, kvcrush, "),
    ("snapkv 0.2", "counts tokens: give --tokens, the length of the prompts"),
    ("snapkv 0.2 --tokens 99 layer_budget=pyramid", "cannot be told layer_budget='pyramid'; of such"),
    ("snapkv 0.2 --tokens 99 scorer=knorm", "cannot be told scorer='knorm'; of such"),
    ("cdpruner 0.2 first_token=compressed", "cannot be told first_token='compressed'; of such"),
    ("snapkv 0.2 --tokens 500 decode_budget=64", "has one budget for prompt and answer: decode_budget=64"),
    ("snapkv 0.2 --tokens 300", "keeps 1 of first tokens"),
    ("cdpruner 1", "prunes 1 to 99 percent of the vision tokens: ratio=1.0"),
    ("cdpruner 0.5 relevance=none", "weighs diversity by relevance: give relevance='embeddings'"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_what_openvino_cannot_be_told_ends_in_one_line(line, message, capsys):
    assert __main__.main(["export", *line.split(), "--engine", "openvino"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert f"OpenVINO GenAI {message}" in err
    assert (err.count("\n"), out) == (1, "")


def openvino_genai(monkeypatch, **more) -> SimpleNamespace:
    """A package of that name."""
    package = SimpleNamespace(
        __version__="2026.4.1.0-3408",
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        AggregationMode=SimpleNamespace(SUM="sum"),
        **more,
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", package)
    return package


def test_the_command_writes_what_openvino_is_given(tmp_path, capsys, monkeypatch):
    file = tmp_path / "kvcrush.json"
    line = f"export kvcrush 0.25 --engine openvino --tokens 2048 --out {file}"
    assert __main__.main(line.split()) == 0
    assert "differs: all heads of a layer keep the same tokens" in capsys.readouterr().out
    given = {}
    package = openvino_genai(
        monkeypatch,
        KVCrushAnchorPointMode=SimpleNamespace(ALTERNATING="alternating"),
        KVCrushConfig=lambda *values: values,
        CacheEvictionConfig=lambda **values: given.update(values),
    )
    scheduler, _ = openvino.load(file)
    assert scheduler.use_cache_eviction
    assert given == {
        **{"start_size": 32, "recent_size": 32, "max_cache_size": 384, "aggregation_mode": "sum"},
        **{"apply_rotation": False, "snapkv_window_size": 16, "kvcrush_config": (4, "alternating")},
    }
    package.__version__ = "2026.3.1.0"
    with pytest.raises(
        KVCompressError, match=r"^openvino_genai is 2026\.3\.1\.0: these settings need 2026\.4 or later$"
    ):
        openvino.load(file)
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(KVCompressError, match=r"^openvino_genai is not installed: pip install openvino-genai$"):
        openvino.load(file)


def test_a_file_that_was_changed_by_hand_is_refused_in_one_line(tmp_path, monkeypatch):
    changed = {"engine": "openvino", "settings": {"cache_eviction_config": {"aggregation_mode": "MEAN"}}}
    (tmp_path / "x.json").write_text(json.dumps(changed))
    openvino_genai(monkeypatch)
    with pytest.raises(KVCompressError, match=r": OpenVINO GenAI refuses it: .* no attribute 'MEAN'$"):
        openvino.load(tmp_path / "x.json")


@pytest.mark.parametrize("content", [None, "[]", "{}", '{"engine": "openvino"}', '{"engine": "vllm", "settings": {}}'])
def test_another_file_is_refused_before_openvino_is_imported(tmp_path, content, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(KVCompressError, match=r" was not written by `kvcompress export --engine openvino`$"):
        openvino.load(tmp_path / "x.json")


@pytest.fixture(scope="module")
def calibration() -> str:
    return calibration_file("triattention", FAMILIES["qwen2"].build())


def exported(engine: str, calibration: str, tmp_path, *options: str) -> dict:
    out = tmp_path / "stats.pt"
    line = ["export", "triattention", "1", f"calibration={calibration}", "decode_budget=512", *options]
    assert __main__.main([*line, "--engine", engine, "--out", str(out)]) == 0
    return json.loads((tmp_path / "stats.json").read_text())["settings"]


def test_triattentions_calibration_is_written_and_read_back(calibration, tmp_path):
    exported("tensorrt-llm", calibration, tmp_path)
    known = files.load(calibration)
    back = TriAttentionKVCluster.from_published(tmp_path / "stats.pt", known.model)
    assert back.keys() == known.tensors.keys()
    assert all(torch.equal(back[name], known.tensors[name]) for name in back)


def test_the_calibration_is_as_both_engines_read_it(calibration, tmp_path):
    """Pairs of channels as complex numbers, one entry per layer and query head, as TensorRT-LLM converts them."""
    exported("triattention-vllm", calibration, tmp_path)
    raw, known = torch.load(tmp_path / "stats.pt", weights_only=True), files.load(calibration)
    half = known.model.head_dim // 2
    assert raw["metadata"]["head_dim"] == known.model.head_dim
    assert len(raw["stats"]) == len(raw["metadata"]["sampled_heads"]) == known.model.layers * known.model.heads
    for layer, head in raw["metadata"]["sampled_heads"]:
        stats, mean = raw["stats"][f"layer{layer:02d}_head{head:02d}"], known.tensors["mean"][layer, head]
        complexes = torch.complex(stats["q_mean_real"], stats["q_mean_imag"])
        assert torch.equal(complexes, torch.complex(mean[:half], mean[half:]))
        assert torch.equal(stats["q_abs_mean"], known.tensors["norms"][layer, head])
        assert (complexes.abs() <= stats["q_abs_mean"] + 1e-6).all()


def test_the_engines_are_told_budget_and_interval(calibration, tmp_path):
    compression = exported("tensorrt-llm", calibration, tmp_path, "protect=prompt")["kv_cache_compression_config"]
    assert compression == {
        **{"algorithm": "triattention", "budget": 512, "beta": 128, "eviction_mode": "per_layer_perhead"},
        "calibration_path": str(tmp_path / "stats.pt"),
    }
    variables = exported(
        "triattention-vllm", calibration, tmp_path, "protect=prompt", "decode_interval=64", "group=mean"
    )
    assert variables == {
        "TRIATTN_RUNTIME_KV_BUDGET": "512",
        "TRIATTN_RUNTIME_DIVIDE_LENGTH": "64",
        "TRIATTN_RUNTIME_WINDOW_SIZE": "0",
        "TRIATTN_RUNTIME_PRUNING_MODE": "per_layer_per_head",
        "TRIATTN_RUNTIME_LAYER_PERHEAD_AGGREGATION": "mean",
        "TRIATTN_RUNTIME_PROTECT_PREFILL": "true",
        "TRIATTN_RUNTIME_SPARSE_STATS_PATH": str(tmp_path / "stats.pt"),
    }


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("snapkv", {"ratio": 1}, "has nothing like method 'snapkv'; it has: triattention"),
        ("triattention", {"ratio": 0.5}, "evicts while decoding only: give the ratio 1 and decode_budget="),
        ("triattention", {"ratio": 1}, "evicts while decoding only: give the ratio 1 and decode_budget="),
        ("triattention", {"farthest": 9}, "looks ahead by 65536 tokens, not by farthest=9"),
        ("triattention", {"protect": "text"}, "cannot be told protect='text', only protect='prompt'"),
        ("triattention", {"merge": "average"}, "cannot be told merge='average'"),
        ("triattention", {"group": "mean"}, "takes the largest score of a KV head's queries: give group='max'"),
    ],
)
def test_what_tensorrt_llm_cannot_be_told_writes_nothing(method, options, message, calibration, tmp_path):
    if method == "triattention":
        decoding = {} if "ratio" in options else {"ratio": 1, "decode_budget": 9}
        options = {"calibration": calibration, **decoding, **options}
    with pytest.raises(KVCompressError) as caught:
        triattention.export(make_policy(method, **options), "tensorrt-llm", tmp_path / "stats.pt")
    assert str(caught.value).startswith(f"TensorRT-LLM {message}")
    assert not [*tmp_path.iterdir()]


def test_a_calibration_of_partly_rotated_heads_has_no_place_in_the_file(tmp_path):
    model = files.ModelIdentity("x", "", 1, 2, 1, 8, "")
    known = files.Calibration("triattention", model, {"mean": torch.zeros(1, 2, 8), "norms": torch.zeros(1, 2, 2)})
    with pytest.raises(KVCompressError, match=r"^the calibration is of a model that rotates 4 of 8 channels; "):
        triattention.write(known, tmp_path / "stats.pt")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--engine tensorrt-llm", "--engine tensorrt-llm needs --out NAME.pt for the calibration"),
        ("--engine tensorrt-llm --out x.json", "--out 'x.json' does not end with .pt"),
        ("--engine openvino --out x.pt", "--out 'x.pt' does not end with .json"),
        ("--engine tensorrt-llm --tokens 9 --out x.pt", "--engine tensorrt-llm takes neither --tokens nor --block"),
    ],
)
def test_an_engine_has_a_file_of_its_own_kind(flags, message, capsys):
    assert __main__.main(["export", "snapkv", "1", *flags.split()]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("flag", ["--tokens", "--block"])
def test_a_flag_of_other_methods_is_not_ignored(flag, capsys):
    assert __main__.main(["export", "cdpruner", "0.25", "--engine", "openvino", flag, "16"]) == 2
    assert "cdpruner takes neither --tokens nor --block" in capsys.readouterr().err
