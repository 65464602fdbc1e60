"""Make a policy of what a user asks for: check and combine the method's options and the engine's."""

from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

from ..clusters.base import KVCluster, make_cluster
from ..clusters.calibrated import check_calibration
from ..clusters.learned import check_checkpoint
from ..errors import KVCompressError, unknown_name, validated
from ..kernels.quantization import PACKAGES, check_bits
from ..methods import MethodInfo, list_methods, make_method, method_info, method_name, untyped
from ..scoring.budget import Budget
from ..scoring.merging import MERGES
from ..scoring.selection import ADAPTIVE
from ..tokens.base import Sees, TokenMethod
from .conflicts import (
    BIASES,
    CALIBRATION,
    CONTEXT_FIRST,
    DECODE_EVICTION,
    FAIR,
    HIDDEN_STATES,
    MEASURED,
    MOVED_KEYS,
    PREFILL_CHUNK,
    SCORER,
    check_conflicts,
)
from .options import STORAGE_OPTIONS, TAKEN, Engine, all_options
from .policy import Policy

# What a method may let the model read before entries are chosen -> options that it then needs.
SECOND_PASSES = {"": (), "context": ("chunk_size", "sinks", "instruction"), "answer": ("answer_tokens",)}


def make_policy(
    method: str | None = None, ratio: float | None = None, budget: int | None = None, **options: object
) -> Policy:
    """Check and combine the user's options, the method's and the engine's. Raises KVCompressError."""
    info, scorer = method_info(method), options.get("scorer")
    if scorer is not None and method_name(scorer) not in list_methods():
        raise unknown_name("scorer: there is no method", scorer, list_methods())
    valid = all_options(info, scorer)
    for name in options:
        if name not in valid:
            raise unknown_name(f"method {info.name!r} has no option", name, valid, untyped(info.cls, name))
    if (preset := options.pop("preset", None)) is not None:
        preset = str(preset)  # a command line reads 192 as a number
        ratio, budget, options = _with_preset(preset, info, valid, ratio, budget, options)
    scored_by = info if scorer is None else method_info(scorer)
    if scored_by is not info and issubclass(scored_by.cls, TokenMethod):
        raise KVCompressError(f"method {scored_by.name!r} cannot be a scorer: it drops tokens before they are cached")
    if taken := TAKEN & scored_by.options.keys():
        raise KVCompressError(
            f"option {min(taken)!r} of method {scored_by.name!r} needs another name: this one is taken"
        )
    own = {name: value for name, value in options.items() if name in scored_by.options}
    of_engine = {name: value for name, value in options.items() if name not in own}
    tokens = None
    if issubclass(info.cls, TokenMethod):
        tokens, cluster = make_method(info.name, **own), make_cluster("full")
        if tokens.sees not in get_args(Sees):
            raise unknown_name(f"method {info.name!r}: there is no sees", tokens.sees, get_args(Sees))
        of_engine = {"ratio_of": "vision", **of_engine}
    else:
        cluster = make_cluster(scored_by.name, **own)
        check_checkpoint(cluster, scored_by.name)
        check_calibration(cluster, scored_by.name)
    if (of_engine.get("cache_implementation"), of_engine.get("kv_backend")) == ("quantized", "fp8"):
        of_engine = {"kv_bits": 8, **of_engine}
    engine = validated(Engine, "option", of_engine)
    wanted = method_budget(info.name, ratio, budget)
    if cluster.of_variant("sinks_on_top") and engine.ratio_of == "prompt":  # otherwise `ratio` counts no sinks anyway
        wanted = replace(wanted, on_top=cluster.sinks)
    policy = Policy(info.name, cluster, wanted, engine, tokens)
    if tokens is not None and engine.ratio_of != "vision":
        raise KVCompressError(f"method {info.name!r} drops vision tokens only: ratio_of='vision', not 'prompt'")
    if engine.decode_budget is not None and engine.decode_ratio is not None:
        raise KVCompressError("give either decode_budget= or decode_ratio=, not both")
    _check_parts(policy, info, scored_by)
    if policy.protect is not None and engine.ratio_of == "vision":
        raise KVCompressError("ratio_of='vision' evicts no text, so protect= and protect_text= need ratio_of='prompt'")
    if policy.fair is not None:
        check_conflicts(policy, FAIR)
    if engine.context_tokens is not None and engine.scope == "prompt":
        raise KVCompressError(f"context_tokens={engine.context_tokens} needs scope='context' or 'context-first'")
    if engine.scope == "context-first":
        check_conflicts(policy, CONTEXT_FIRST)
    _check_storage(engine, [name for name in STORAGE_OPTIONS if getattr(engine, name) != getattr(Engine, name)])
    return policy


def _with_preset(
    preset: str, info: MethodInfo, valid: Iterable[str], ratio: float | None, budget: int | None, options: dict
) -> tuple[float | None, int | None, dict[str, object]]:
    """Return the ratio, the budget and the options, completed by those that a preset publishes."""
    if preset not in info.presets:
        raise unknown_name(f"method {info.name!r} has no preset", preset, info.presets)
    published = dict(info.presets[preset])
    size = {name: published.pop(name) for name in ("ratio", "budget") if name in published}
    for name in published:
        if name not in valid:
            raise unknown_name(f"preset {preset!r} of method {info.name!r} sets no option", name, valid)
    is_resized = bool(size) and not (ratio is None and budget is None)
    if size and not is_resized:
        ratio, budget = size.get("ratio"), size.get("budget")
    if is_resized or "decode_ratio" in options:  # the preset's decode budget goes with its own size
        published.pop("decode_budget", None)
    return ratio, budget, {**published, **options}


def _check_storage(engine: Engine, given: list[str]) -> None:
    """Check that the storage options that were `given` fit together and their packages are installed."""
    for name in given:
        kind = {"kv": "quantized", "key": "think"}.get(name.partition("_")[0], engine.cache_implementation)
        if kind != engine.cache_implementation:
            raise KVCompressError(f"{name}= needs cache_implementation={kind!r}")
    if engine.cache_implementation != "quantized":
        return
    if engine.kv_backend in PACKAGES:
        engine.quantizer.check()
    else:
        check_bits(engine.kv_backend, engine.kv_bits)
        if of_groups := {"kv_group_size", "kv_residual"} & set(given):
            raise KVCompressError(
                f"{min(of_groups)}= is not for kv_backend={engine.kv_backend!r}: it is for quanto and hqq"
            )


def _check_parts(policy: Policy, info: MethodInfo, scored_by: MethodInfo) -> None:
    """Check that the method, the scorer, the layer budget, the merge and the passes fit together."""
    if scored_by is not info:
        check_conflicts(policy, SCORER)
        if scored_by.name == "full" or scored_by.cls.update_kv is not KVCluster.update_kv:
            raise KVCompressError(f"method {scored_by.name!r} cannot be a scorer: it does not choose by scores")
    # A method's class attributes, too, are checked: it may be a user's own.
    second = policy.cluster.second_pass
    if second not in SECOND_PASSES:
        raise unknown_name("there is no second_pass", second, SECOND_PASSES)
    if missing := [name for name in SECOND_PASSES[second] if not hasattr(policy.cluster, name)]:
        options = ", ".join(map(repr, missing))
        raise KVCompressError(f"method {scored_by.name!r} has second_pass={second!r}, but no option {options}")
    chosen = {name: policy.chosen(name) for name in ("safeguard", "decode_interval")}
    validated(Engine, f"method {scored_by.name!r}:", chosen)
    heads = ["uniform", "shared", *ADAPTIVE]
    if policy.head_budget not in heads:
        raise unknown_name("there is no head_budget", policy.head_budget, heads)
    merges = ["none", *MERGES]
    if policy.chosen("merge") not in merges:
        raise unknown_name("there is no merge", policy.chosen("merge"), merges)
    if policy.engine.merge_modality != "any" and policy.chosen("merge") == "none":
        raise KVCompressError(f"merge_modality={policy.engine.merge_modality!r} needs merge=")
    check_conflicts(policy, CALIBRATION, MEASURED, HIDDEN_STATES, *([BIASES] if policy.cluster.biases_keys else []))
    if policy.decode is not None:
        check_conflicts(policy, DECODE_EVICTION, *([MOVED_KEYS] if policy.moves_keys else []))
    if policy.engine.prefill_chunk is not None:
        check_conflicts(policy, PREFILL_CHUNK)


def method_budget(method: str | None, ratio: float | None, budget: int | None) -> Budget:
    """Return the budget of a method. `full` keeps everything and takes no other budget; all other methods need one."""
    name = method_info(method).name
    if name != "full":
        if ratio is None and budget is None:
            raise KVCompressError(f"method {name!r} needs ratio= (fraction kept, in (0, 1]) or budget= (entries kept)")
        return Budget(ratio, budget)
    if budget is not None or ratio not in (None, 1):
        raise KVCompressError(f"method 'full' compresses nothing: ratio={ratio}, budget={budget} cannot be honoured")
    return Budget(ratio=1.0)
