"""OpenVINO GenAI: the methods that its cache eviction and vision-token pruning have.

Its eviction keeps blocks of tokens, of the same tokens for all heads of a layer: the first, the most recent, and of
those between them the blocks whose tokens were attended to most. It evicts after the first decode step and whenever
another block is full, so the budget also holds while decoding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import KVCompressError, one_line, shown
from ..files import parse_json
from ..policy.policy import Policy
from ..scoring.budget import effivlm_window
from .settings import Settings, check_carried, listed

ENGINE, NAME = "openvino", "OpenVINO GenAI"
TESTED = (2026, 4)  # the oldest version with these fields that was run
BLOCK = 32  # tokens of a block on a CPU; 16 on a GPU
CARRIED = ("decode_budget", "head_budget", "positions")

OF_EVERY_EVICTION = (
    "whole blocks are kept or evicted, up to a block more than the budget until the next one is full",
    "at least one block of first tokens always stays",
    "a token counts as its most attended neighbour does, of itself and the six after it",
    "the prompt is evicted after the first decode step, and new tokens later within the same budget",
)


@dataclass(frozen=True)
class Areas:
    """How the cache is divided, in tokens, and how the tokens between the first and the recent ones are ranked.

    Attributes:
        first, recent: tokens that always stay, before they are rounded up to blocks.
        window: the last queries of the prompt whose attention counts; 0: all of them.
        representatives: part of what first and recent tokens leave that KVCrush chooses.
        settings: further fields of the engine's config.
        differences: what the engine does otherwise than this method.
    """

    first: int
    recent: int
    window: int
    representatives: float = 0.0
    settings: tuple[tuple[str, object], ...] = ()
    differences: tuple[str, ...] = ()


def _h2o(cluster: Any, budget: int) -> Areas:
    return Areas(first=0, recent=cluster.recent_tokens(budget), window=0)


def _snapkv(cluster: Any, budget: int) -> Areas:
    window = effivlm_window(budget) if cluster.of_variant("recent_tenth") else cluster.window_size
    pooled = f"votes are pooled so, not by {cluster.pooling} over {cluster.kernel_size}"
    again = "attention is summed over the window and all decoded tokens' queries, not read from the last queries anew"
    return Areas(first=0, recent=window, window=window, differences=(pooled, again))


def _kvcrush(cluster: Any, budget: int) -> Areas:
    anchor = {"anchor_point_mode": cluster.anchor.upper()}
    bits = "a block has a bit per token, and blocks stand for blocks; here a token has a bit per KV head"
    return Areas(
        cluster.sinks,
        cluster.recent,
        cluster.window_size,
        cluster.representatives,
        (("kvcrush_config", anchor),),
        (bits,),
    )


def _rkv(cluster: Any, budget: int) -> Areas:
    adaptive = {"window_size": cluster.window_size}  # and its own attention mass
    differences = (
        "blocks with nine tenths of the attention stay, the rest by how little they are alike: balance and similar "
        "have no counterpart",
        "openvino-genai 2026.4.1 ends a request with an error at its first eviction in this mode, on a CPU",
    )
    settings = (("aggregation_mode", "ADAPTIVE_RKV"), ("adaptive_rkv_config", adaptive))
    return Areas(0, cluster.window_size, cluster.window_size, settings=settings, differences=differences)


EVICTION: dict[str, Callable[[Any, int], Areas]] = {"h2o": _h2o, "kvcrush": _kvcrush, "r-kv": _rkv, "snapkv": _snapkv}
METHODS = (*EVICTION, "cdpruner")


def export(policy: Policy, tokens: int | None, block: int = BLOCK) -> Settings:
    """Translate a policy. Raises KVCompressError if OpenVINO GenAI has no such method, option or size.

    Args:
        policy: with a ratio.
        tokens: length of the prompts that the ratio is a part of; KV methods need it, as the engine counts tokens.
        block: tokens of a block: 32 on a CPU, 16 on a GPU.
    """
    if policy.method not in METHODS:
        raise KVCompressError(f"{NAME} has nothing like method {policy.method!r}; it has: {listed(METHODS)}")
    if policy.method == "cdpruner":
        check_carried(policy, NAME, ())
        return _pruning(policy)
    check_carried(policy, NAME, CARRIED)
    if tokens is None:
        raise KVCompressError(
            f"{NAME} counts tokens: give --tokens, the length of the prompts of which to keep a share"
        )
    return _eviction(policy, policy.budget(tokens), block)


def _eviction(policy: Policy, budget: int, block: int) -> Settings:
    if policy.engine.decode_budget not in (None, budget):
        raise KVCompressError(
            f"{NAME} has one budget for prompt and answer: decode_budget={policy.engine.decode_budget} is not {budget}"
        )
    areas = EVICTION[policy.method](policy.cluster, budget)
    first, recent = (max(1, math.ceil(size / block)) for size in (areas.first, areas.recent))
    total = math.floor(budget / block + 0.5)
    room = total - first - recent
    crush = math.floor(areas.representatives * room + 0.5)
    if room - crush < 1:
        raise KVCompressError(
            f"a budget of {budget} tokens is {total} blocks of {block}, but {NAME} keeps {first} of first tokens and "
            f"{recent} of recent ones, {crush} of representatives, and needs one to choose"
        )
    config: dict[str, Any] = {
        "start_size": first * block,
        "recent_size": recent * block,
        "max_cache_size": (total - crush) * block,  # representatives come on top
        "aggregation_mode": "SUM",
        "apply_rotation": policy.moves_keys,
        "snapkv_window_size": areas.window,
        **dict(areas.settings),
    }
    if "kvcrush_config" in config:
        config["kvcrush_config"] = {"budget": crush, **config["kvcrush_config"]}
    differences = [*OF_EVERY_EVICTION, *areas.differences]
    if policy.head_budget != "shared":
        differences.append("all heads of a layer keep the same tokens, as with head_budget=shared")
    if total * block != budget:
        differences.append(f"the budget of {budget} tokens is rounded to {total * block}")
    if policy.decode is None:
        differences.append("decoded tokens are evicted, too; without decode_budget= they all stay here")
    return Settings(ENGINE, policy.method, policy.budget.ratio, {"cache_eviction_config": config}, tuple(differences))


def _pruning(policy: Policy) -> Settings:
    percent = math.floor(100 * (1 - policy.budget.ratio) + 0.5)
    if not 1 <= percent <= 99:
        raise KVCompressError(f"{NAME} prunes 1 to 99 percent of the vision tokens: ratio={policy.budget.ratio}")
    if policy.tokens.relevance != "embeddings":  # its weight 0 kept other tokens than the most diverse ones
        raise KVCompressError(f"{NAME} weighs diversity by relevance: give relevance='embeddings'")
    differences = [
        "relevance is to the mean embedding of all text, here to each token of the text after the last picture",
        "the tokens are split into two halves with a relevance each (CDPRUNER_SPLIT_THRESHOLD=0: not split)",
        "only Qwen2-VL and Qwen2.5-VL (no videos) and Qwen3-VL are pruned, each picture or frame to its own share",
        "a pipeline prunes in generate(), not in add_request()",
    ]
    if not math.isclose(percent, 100 * (1 - policy.budget.ratio), abs_tol=1e-6):
        differences.append(f"the ratio is rounded to whole percents: {100 - percent} % stay")
    settings = {"generation_config": {"pruning_ratio": percent, "relevance_weight": 1.0}}
    return Settings(ENGINE, policy.method, policy.budget.ratio, settings, tuple(differences))


def load(path: Path) -> tuple[Any, Any]:
    """Make OpenVINO GenAI's `SchedulerConfig` and `GenerationConfig` from an exported file.

    Raises KVCompressError for another file, a missing package or a version that was not tested."""
    try:
        found = parse_json(path.read_bytes())
        if found["engine"] != ENGINE:
            raise KeyError(found["engine"])
        eviction, generation = (
            found["settings"].get(name, {}) for name in ("cache_eviction_config", "generation_config")
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise KVCompressError(f"{shown(str(path))} was not written by `kvcompress export --engine {ENGINE}`") from None
    genai = _package()
    scheduler, generating = genai.SchedulerConfig(), genai.GenerationConfig()
    try:
        if eviction:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = _eviction_config(genai, dict(eviction))
        for name, value in generation.items():
            setattr(generating, name, value)
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise KVCompressError(f"{shown(str(path))}: OpenVINO GenAI refuses it: {one_line(error)}") from None
    return scheduler, generating


def _eviction_config(genai: Any, config: dict[str, Any]) -> Any:
    """Make a `CacheEvictionConfig`."""
    config["aggregation_mode"] = getattr(genai.AggregationMode, config["aggregation_mode"])
    adaptive = config.pop("adaptive_rkv_config", {})  # no argument of the constructor
    if crush := config.pop("kvcrush_config", None):
        mode = getattr(genai.KVCrushAnchorPointMode, crush["anchor_point_mode"])
        config["kvcrush_config"] = genai.KVCrushConfig(crush["budget"], mode)
    made = genai.CacheEvictionConfig(**config)
    for name, value in adaptive.items():
        setattr(made.adaptive_rkv_config, name, value)
    return made


def _package() -> Any:
    """Import openvino_genai. Raises KVCompressError."""
    try:
        import openvino_genai
    except ImportError:
        raise KVCompressError("openvino_genai is not installed: pip install openvino-genai") from None
    version = tuple(int(part) for part in openvino_genai.__version__.split(".")[:2])
    if version < TESTED:
        wanted = ".".join(map(str, TESTED))
        raise KVCompressError(f"openvino_genai is {openvino_genai.__version__}: these settings need {wanted} or later")
    return openvino_genai
