"""vLLM's plugin `kvcompress`: it starts an engine whose model prunes vision tokens, or whose cache evicts blocks.

Asked for by KVCOMPRESS_METHOD and KVCOMPRESS_RATIO, or by the engine's argument `hf_overrides={"kvcompress":
{"method": "evs", "ratio": 0.25}}`, which may hold the method's options, too. Without either, the engine is vLLM's own.
"""

import functools
import sys
from pathlib import Path
from typing import Any

from ..clusters.base import KVCluster
from ..errors import KVCompressError, shown, unknown_name
from ..methods import method_info
from .blocks import BlockEvictor
from .media import MediaPruner, asked_of

SUPPORTED = "0.32"  # the models of `vllm_models.py` override methods that differ between releases of vLLM
KEY = "kvcompress"  # in `hf_overrides`, and the attribute of the model's configuration
MODELS = {  # architecture -> class in vllm_models.py
    "Qwen2_5_VLForConditionalGeneration": "PrunedQwen2_5_VL",
    "Qwen3VLForConditionalGeneration": "PrunedQwen3VL",
}
CONFIGURED = "_kvcompress_configured"  # an attribute of the engine's arguments
UNCHANGED = {"kv_transfer_config": None, "worker_cls": "auto", "tensor_parallel_size": 1, "pipeline_parallel_size": 1}


def register() -> None:
    """Register the models that prune, and read what is asked for when an engine is configured. vLLM calls this."""
    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs

    for name in MODELS.values():
        ModelRegistry.register_model(name, f"{__package__}.vllm_models:{name}")
    original = EngineArgs.create_model_config
    if hasattr(original, "__wrapped__"):  # vLLM may load a plugin several times
        return

    @functools.wraps(original)
    def create_model_config(arguments: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            configure(arguments)
        except KVCompressError as error:
            if Path(sys.argv[0]).name != "vllm":
                raise
            raise SystemExit(f"error: {error}") from None  # to a command's user, one line
        return original(arguments, *args, **kwargs)

    EngineArgs.create_model_config = create_model_config


def configure(arguments: Any) -> None:
    """Make vLLM's `EngineArgs` load a model that prunes, if it is asked for; once, however often vLLM asks for its
    configuration. Raises KVCompressError."""
    if vars(arguments).get(CONFIGURED):
        return
    _configure(arguments)
    setattr(arguments, CONFIGURED, True)


def _configure(arguments: Any) -> None:
    overrides = arguments.hf_overrides
    given = overrides.get(KEY, {}) if isinstance(overrides, dict) else {}
    if not isinstance(given, dict):
        raise KVCompressError(f"hf_overrides: {KEY!r} is {shown(given)}, not the method with its options")
    asked = {**asked_of(), **given}
    if not asked:
        return
    if "method" not in asked:
        raise KVCompressError(f"hf_overrides: {KEY!r} is {shown(given)}, which names no method")
    if issubclass(method_info(str(asked["method"])).cls, KVCluster):
        evict(arguments, asked)
        return
    pruner = MediaPruner.of(**asked)
    check_version()
    if not isinstance(overrides, dict):
        raise KVCompressError(f"KVCOMPRESS_METHOD={pruner.name} needs hf_overrides to be a dictionary, not a function")
    if arguments.video_pruning_rate:
        raise KVCompressError(f"video_pruning_rate= and method {pruner.name!r} both prune videos: give one")
    if pruner.budget.ratio == 1:
        arguments.hf_overrides = {name: value for name, value in overrides.items() if name != KEY}
        return
    architecture = architecture_of(arguments)
    if architecture not in MODELS:
        raise unknown_name("kvcompress prunes in vLLM no model of architecture", architecture, MODELS)
    arguments.hf_overrides = {**overrides, "architectures": [MODELS[architecture]], KEY: asked}
    arguments.video_pruning_rate = 0.5  # any: vLLM then asks the model for the positions of the tokens that stay
    use_worker(arguments)


def evict(arguments: Any, asked: dict[str, Any]) -> None:
    """Make vLLM's `EngineArgs` evict blocks of each prompt. Raises KVCompressError."""
    if "ratio" not in asked:
        raise KVCompressError(f"method {asked['method']!r} needs ratio=: the share of a prompt that stays")
    evictor = BlockEvictor.of(**asked)
    check_version()
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    if isinstance(arguments.hf_overrides, dict):
        arguments.hf_overrides = {name: value for name, value in arguments.hf_overrides.items() if name != KEY}
    if evictor.ratio == 1:
        return
    if not current_platform.is_cpu():
        raise KVCompressError("kvcompress evicts in vLLM only on a CPU: no other attention backend leaves blocks out")
    for name, own in UNCHANGED.items():
        if (value := getattr(arguments, name)) != own:
            raise KVCompressError(f"kvcompress cannot evict in vLLM with {name}={shown(value)}")
    arguments.worker_cls = f"{__package__}.vllm_eviction.EvictingCPUWorker"
    arguments.kv_transfer_config = KVTransferConfig(
        kv_connector="EvictionConnector",
        kv_connector_module_path=f"{__package__}.vllm_eviction",
        kv_role="kv_both",
        kv_connector_extra_config=asked,
    )


def check_version() -> None:
    """Raise KVCompressError unless vLLM is a release that is supported."""
    from vllm import __version__

    if not __version__.startswith(f"{SUPPORTED}."):
        raise KVCompressError(f"kvcompress supports vLLM {SUPPORTED}, but {__version__} is installed")


def architecture_of(arguments: Any) -> str | None:
    """Return the model's architecture, read from its configuration."""
    from vllm.transformers_utils.config import get_config

    config = get_config(
        arguments.hf_config_path or arguments.model,
        arguments.trust_remote_code,
        arguments.revision,
        arguments.code_revision,
        arguments.config_format,
        token=arguments.hf_token,
    )
    return (config.architectures or [None])[0]


def use_worker(arguments: Any) -> None:
    """On a CPU, use the worker that tells vLLM's runner that tokens are pruned."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        if arguments.worker_cls != "auto":
            raise KVCompressError(
                f"kvcompress has its own worker on a CPU: worker_cls={arguments.worker_cls!r} is taken"
            )
        arguments.worker_cls = f"{__package__}.vllm_worker.PruningCPUWorker"
