"""What the plugin makes of vLLM's arguments, without vLLM."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvcompress import KVCompressError
from kvcompress.engines import vllm_plugin
from kvcompress.engines.vllm_plugin import MODELS, SUPPORTED, configure

QWEN = "Qwen2_5_VLForConditionalGeneration"


@pytest.fixture(autouse=True)
def vllm(monkeypatch) -> ModuleType:
    """A vLLM that has a version, and a model that is a Qwen2.5-VL; nothing is asked for."""
    module = ModuleType("vllm")
    module.__version__ = f"{SUPPORTED}.0"
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_plugin, "architecture_of", lambda arguments: QWEN)
    monkeypatch.setattr(vllm_plugin, "use_worker", lambda arguments: None)
    for name in ("METHOD", "RATIO"):
        monkeypatch.delenv(f"KVCOMPRESS_{name}", raising=False)
    return module


def arguments(**overrides) -> SimpleNamespace:
    return SimpleNamespace(hf_overrides=overrides, video_pruning_rate=None, worker_cls="auto")


@pytest.mark.parametrize("asked", [{}, {"kvcompress": {"method": "evs", "ratio": 1}}])
def test_where_nothing_is_to_be_pruned_vllm_is_as_it_is(asked, monkeypatch):
    given = arguments(**asked, text_config={"x": 1})
    configure(given)
    monkeypatch.setenv("KVCOMPRESS_METHOD", "evs")  # too late: vLLM asks for its configuration again
    monkeypatch.setenv("KVCOMPRESS_RATIO", "0.25")
    configure(given)
    assert (given.hf_overrides, given.video_pruning_rate, given.worker_cls) == ({"text_config": {"x": 1}}, None, "auto")


def test_the_environment_or_the_argument_chooses_the_model_that_prunes(monkeypatch):
    asked = {"method": "evs", "ratio": 0.25}
    by_argument = arguments(kvcompress=asked, x=1)
    configure(by_argument)
    assert by_argument.hf_overrides == {"x": 1, "architectures": [MODELS[QWEN]], "kvcompress": asked}
    assert by_argument.video_pruning_rate
    configure(by_argument)  # vLLM may ask for its configuration twice
    monkeypatch.setenv("KVCOMPRESS_METHOD", "evs")
    monkeypatch.setenv("KVCOMPRESS_RATIO", "0.25")
    by_environment = arguments(x=1)
    configure(by_environment)
    assert by_environment == by_argument
    both = arguments(kvcompress={"ratio": 0.5})  # the argument wins
    configure(both)
    assert both.hf_overrides["kvcompress"] == {"method": "evs", "ratio": 0.5}


@pytest.fixture
def cpu(vllm, monkeypatch) -> SimpleNamespace:
    """A platform that is a CPU; `KVTransferConfig` is the dictionary of its arguments."""
    for name, content in {
        "config": {"KVTransferConfig": dict},
        "platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
    }.items():
        module = ModuleType(f"vllm.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)
    return sys.modules["vllm.platforms"].current_platform


def evicting(**more) -> SimpleNamespace:
    asked = {"method": "knorm", "ratio": 0.5}
    return SimpleNamespace(hf_overrides={"kvcompress": asked, "x": 1}, **{**vllm_plugin.UNCHANGED, **more})


def test_a_kv_method_chooses_the_connector_and_the_worker_that_evict(cpu, monkeypatch):
    monkeypatch.setenv("KVCOMPRESS_METHOD", "knorm")
    monkeypatch.setenv("KVCOMPRESS_RATIO", "0.5")
    given = evicting()
    for _ in range(2):  # vLLM may ask for its configuration twice
        configure(given)
    assert given.hf_overrides == {"x": 1}
    assert given.worker_cls == "kvcompress.engines.vllm_eviction.EvictingCPUWorker"
    connector = given.kv_transfer_config
    assert connector["kv_connector_module_path"] == "kvcompress.engines.vllm_eviction"
    assert connector["kv_connector_extra_config"] == {"method": "knorm", "ratio": 0.5}


@pytest.mark.parametrize(
    "taken",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"worker_cls": "x.Y"},
        {"kv_transfer_config": {}},
    ],
)
def test_eviction_is_refused_where_it_does_not_reach(taken, cpu):
    with pytest.raises(KVCompressError, match=f"cannot evict in vLLM with {next(iter(taken))}="):
        configure(evicting(**taken))
    cpu.is_cpu = lambda: False
    with pytest.raises(KVCompressError, match="only on a CPU"):
        configure(evicting())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"method": "evss", "ratio": 0.5}, "did you mean 'evs'"),
        ({"method": "evs"}, "needs ratio="),
        ({"method": "evs", "ratio": 0}, "not in"),
        ({"method": "evs", "ratio": 0.5, "cache_implementation": "static"}, "no option 'cache_implementation'"),
        ({"method": "snapkv", "ratio": 0.5}, "cannot evict in a serving engine: it reads queries.*knorm"),
        ({"method": "fastv", "ratio": 0.5}, "cannot prune in a serving engine"),
        ({"method": "knorm"}, "needs ratio="),
        ({"method": "knorm", "ratio": 1.5}, "not in"),
        ({"method": "knorm", "ratio": 0.5, "decode_budget": 8}, "no option 'decode_budget'"),
        ({"ratio": 0.5}, "names no method"),
        ("evs", "not the method with its options"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_read(asked, message, vllm, monkeypatch):
    monkeypatch.setattr(vllm_plugin, "architecture_of", lambda arguments: pytest.fail("the model was looked at"))
    with pytest.raises(KVCompressError, match=message) as raised:
        configure(arguments(kvcompress=asked))
    assert "\n" not in str(raised.value)


def test_another_release_another_model_or_another_pruner_is_an_error(vllm, monkeypatch):
    asked = {"method": "evs", "ratio": 0.5}
    with pytest.raises(KVCompressError, match="both prune videos"):
        configure(SimpleNamespace(hf_overrides={"kvcompress": asked}, video_pruning_rate=0.5, worker_cls="auto"))
    monkeypatch.setattr(vllm_plugin, "architecture_of", lambda arguments: "LlavaForConditionalGeneration")
    with pytest.raises(KVCompressError, match=r"no model of architecture 'Llava.*valid: Qwen2_5_VL"):
        configure(arguments(kvcompress=asked))
    vllm.__version__ = "0.31.2"
    with pytest.raises(KVCompressError, match=rf"supports vLLM {SUPPORTED}, but 0\.31\.2"):
        configure(arguments(kvcompress=asked))
