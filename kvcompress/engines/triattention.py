"""TensorRT-LLM and the authors' vLLM plugin: TriAttention with a calibration of ours.

Both read the file that the authors' `scripts/calibrate.py` writes, `{"metadata", "stats"}` with a head's mean query and
its mean norms under `layerLL_headHH`, and take the frequencies of RoPE from the model that they serve.
"""

from collections.abc import Callable
from pathlib import Path

from ..calibration import files
from ..clusters.triattention import TriAttentionKVCluster
from ..errors import KVCompressError
from ..files import write_torch
from ..policy.policy import Policy
from .settings import Settings, check_carried

TENSORRT_LLM, VLLM = "tensorrt-llm", "triattention-vllm"
NAMES = {TENSORRT_LLM: "TensorRT-LLM", VLLM: "TriAttention's vLLM plugin"}
CARRIED = ("decode_budget", "decode_interval", "protect")
FARTHEST = 65536  # of both engines


def export(policy: Policy, engine: str, out: Path) -> Settings:
    """Translate a policy and write its calibration to `out`. Raises KVCompressError if the engine has no such method.

    Args:
        policy: `triattention` at a ratio of 1 with a decode budget: the engines evict while decoding.
        engine: one of `NAMES`.
        out: the file NAME.pt; its path is among the settings.
    """
    name, cluster = NAMES[engine], policy.cluster
    if policy.method != "triattention":
        raise KVCompressError(f"{name} has nothing like method {policy.method!r}; it has: triattention")
    check_carried(policy, name, CARRIED)
    if policy.budget.ratio != 1 or policy.engine.decode_budget is None:
        raise KVCompressError(f"{name} evicts while decoding only: give the ratio 1 and decode_budget=")
    if policy.engine.protect not in (None, "prompt"):
        raise KVCompressError(f"{name} cannot be told protect={policy.engine.protect!r}, only protect='prompt'")
    if cluster.farthest != FARTHEST:
        raise KVCompressError(f"{name} looks ahead by {FARTHEST} tokens, not by farthest={cluster.farthest}")
    settings, differences = SETTINGS[engine](policy, cluster, out)
    write(files.load(cluster.calibration_file), out)
    return Settings(engine, policy.method, policy.budget.ratio, settings, tuple(differences))


def write(calibration: files.Calibration, out: Path) -> None:
    """Write a calibration in the authors' layout. Raises KVCompressError if it has no place in it."""
    mean, norms = calibration.tensors["mean"], calibration.tensors["norms"]
    if 2 * norms.shape[2] != mean.shape[2]:
        raise KVCompressError(
            f"the calibration is of a model that rotates {2 * norms.shape[2]} of {mean.shape[2]} channels; the file of "
            "the engines is for models that rotate all"
        )
    real, imaginary = (part.clone() for part in mean.chunk(2, dim=-1))
    heads = [(layer, head) for layer in range(mean.shape[0]) for head in range(mean.shape[1])]
    stats = {
        f"layer{layer:02d}_head{head:02d}": {
            "q_mean_real": real[layer, head].clone(),
            "q_mean_imag": imaginary[layer, head].clone(),
            "q_abs_mean": norms[layer, head].clone(),
        }
        for layer, head in heads
    }
    metadata: dict[str, object] = {
        "num_traces": calibration.prompts,
        "head_dim": mean.shape[2],
        "rope_style": "half",
        "sampled_heads": [list(pair) for pair in heads],
    }
    if calibration.model.name:
        metadata["model_path"] = calibration.model.name
    write_torch(out, {"metadata": metadata, "stats": stats})


def _tensorrt_llm(policy: Policy, cluster: TriAttentionKVCluster, out: Path) -> tuple[dict[str, object], list[str]]:
    differences = []
    if policy.engine.protect is None:
        differences.append("the whole prompt stays, as with protect=prompt")
    differences.append("the budget counts decoded tokens only, here the prompt's, too")
    if cluster.group != "max":
        raise KVCompressError(f"{NAMES[TENSORRT_LLM]} takes the largest score of a KV head's queries: give group='max'")
    compression = {
        "algorithm": "triattention",
        "budget": policy.engine.decode_budget,
        "beta": policy.decode_interval,
        "eviction_mode": "per_layer_perhead",
        "calibration_path": str(out),
    }
    config = {"kv_cache_compression_config": compression, "kv_cache_config": {"use_kv_cache_manager_v2": True}}
    return {"backend": "pytorch", **config}, differences


def _vllm(policy: Policy, cluster: TriAttentionKVCluster, out: Path) -> tuple[dict[str, object], list[str]]:
    variables = {
        "KV_BUDGET": policy.engine.decode_budget,
        "DIVIDE_LENGTH": policy.decode_interval,
        "WINDOW_SIZE": 0,
        "PRUNING_MODE": "per_layer_per_head",
        "LAYER_PERHEAD_AGGREGATION": cluster.group,
        "PROTECT_PREFILL": str(policy.engine.protect == "prompt").lower(),
        "SPARSE_STATS_PATH": out,
    }
    early = "a prompt longer than the budget is evicted before the first decode step"
    return {f"TRIATTN_RUNTIME_{name}": str(value) for name, value in variables.items()}, [early]


SETTINGS: dict[str, Callable[[Policy, TriAttentionKVCluster, Path], tuple[dict[str, object], list[str]]]] = {
    TENSORRT_LLM: _tensorrt_llm,
    VLLM: _vllm,
}
