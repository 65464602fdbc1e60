"""The policy: the method, its budget and the engine's options, checked and combined."""

from dataclasses import asdict, dataclass, replace

from ..clusters.base import KVCluster, make_cluster
from ..clusters.calibrated import CalibratedKVCluster, check_calibration
from ..clusters.learned import check_checkpoint
from ..errors import KVCompressError, unknown_name, validated
from ..kernels.quantization import check_bits
from ..layer_budgets import LayerBudget, layer_budget
from ..methods import MethodInfo, list_methods, make_method, method_info, method_name
from ..scoring.budget import Budget
from ..scoring.merging import MERGES
from ..tokens.base import TokenMethod
from .options import PRESCRIBED, STORAGE_OPTIONS, Engine, all_options


@dataclass(frozen=True)
class Policy:
    """The method's `cluster`, its budget and the engine's options, with the method's defaults filled in.

    `tokens` is a method that drops tokens before they are cached; the cluster then keeps everything that reaches it.
    """

    method: str
    cluster: KVCluster
    budget: Budget
    engine: Engine
    tokens: TokenMethod | None = None

    def chosen(self, name: str) -> object:
        """Return one of the `PRESCRIBED` options: the user's value, otherwise the method's default."""
        given, cls = getattr(self.engine, name), method_info(self.method).cls
        if given is not None:
            return given
        if isinstance(self.cluster, cls):
            return self.cluster.of_variant(name)
        return getattr(cls, name, getattr(KVCluster, name))  # another method scores: its variant is not this one's

    @property
    def head_budget(self) -> str:
        return self.chosen("head_budget")

    @property
    def layer_budget(self) -> LayerBudget:
        return self.known_layer_budget or layer_budget(self.chosen("layer_budget"))

    @property
    def known_layer_budget(self) -> LayerBudget | None:
        """The layer budget that the method's calibration file holds, if any."""
        return self.cluster.known_layer_budget if isinstance(self.cluster, CalibratedKVCluster) else None

    @property
    def decode_interval(self) -> int:
        return self.chosen("decode_interval")

    @property
    def needs_sums(self) -> bool:
        """Whether the scores are sums over all queries of a prompt."""
        return type(self.cluster).observe is not KVCluster.observe

    @property
    def sums_attention(self) -> bool:
        """Whether the scores are sums of the queries' attention weights."""
        return self.needs_sums and not self.cluster.reads_hidden

    @property
    def carries_sums(self) -> bool:
        """Whether the stored entries' sums are carried over, from chunk to chunk or from eviction to eviction."""
        return (self.decode is not None or self.engine.prefill_chunk is not None) and self.needs_sums

    @property
    def query_window(self) -> int:
        """How many of the last queries are remembered while decoding."""
        return max(self.cluster.query_window, self.decode_interval if self.carries_sums else 0)

    @property
    def moves_keys(self) -> bool:
        """Whether kept keys are re-rotated to their position in the cache."""
        return self.engine.positions == "cache"

    @property
    def watches_rotary(self) -> bool:
        """Whether the method or the engine needs the model's rotary embedding."""
        return self.cluster.watches_rotary or self.moves_keys

    @property
    def hooks_prompts(self) -> bool:
        """Whether a prompt's forward pass needs hooks on the model."""
        cluster = self.cluster
        is_watched = self.tokens is not None or self.watches_rotary or cluster.second_pass
        return is_watched or cluster.reads_hidden or self.engine.prefill_chunk is not None

    @property
    def hooks_steps(self) -> bool:
        """Whether a decode step's forward pass needs hooks on the model."""
        return (self.cluster.foresees or self.cluster.reads_hidden) and self.decode is not None

    @property
    def options(self) -> dict[str, object]:
        """Every option of the method with its effective value, as in `all_options`."""
        given = {**asdict(self.tokens or self.cluster), **asdict(self.engine)}
        parts = {name: self.chosen(name) for name in PRESCRIBED}
        valid = all_options(method_info(self.method), self.engine.scorer)
        return {name: parts.get(name, given[name]) for name in valid if name != "preset"}

    @property
    def decode(self) -> Budget | None:
        """The budget while decoding; None if every decoded token is kept."""
        if self.engine.decode_budget is None and self.engine.decode_ratio is None:
            return None
        return Budget(self.engine.decode_ratio, self.engine.decode_budget)


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
            raise unknown_name(f"method {info.name!r} has no option", name, valid)
    preset = options.pop("preset", None)
    if preset is not None:
        preset = str(preset)  # a command line reads 192 as a number
        if preset not in info.presets:
            raise unknown_name(f"method {info.name!r} has no preset", preset, info.presets)
        published = dict(info.presets[preset])
        size = {name: published.pop(name) for name in ("ratio", "budget") if name in published}
        is_resized = bool(size) and not (ratio is None and budget is None)
        if size and not is_resized:
            ratio, budget = size.get("ratio"), size.get("budget")
        if is_resized or "decode_ratio" in options:  # the preset's decode budget goes with its own size
            published.pop("decode_budget", None)
        options = {**published, **options}
    scored_by = info if scorer is None else method_info(scorer)
    if scored_by is not info and issubclass(scored_by.cls, TokenMethod):
        raise KVCompressError(f"method {scored_by.name!r} cannot be a scorer: it drops tokens before they are cached")
    own = {name: value for name, value in options.items() if name in scored_by.options}
    of_engine = {name: value for name, value in options.items() if name not in own}
    tokens = None
    if issubclass(info.cls, TokenMethod):
        tokens, cluster = make_method(info.name, **own), make_cluster("full")
        of_engine = {"ratio_of": "vision", **of_engine}
    else:
        cluster = make_cluster(scored_by.name, **own)
        check_checkpoint(cluster, scored_by.name)
        check_calibration(cluster, scored_by.name)
    engine = validated(Engine, "option", of_engine)
    wanted = method_budget(info.name, ratio, budget)
    if cluster.of_variant("sinks_on_top") and engine.ratio_of == "prompt":  # otherwise `ratio` counts no sinks anyway
        wanted = replace(wanted, on_top=cluster.sinks)
    policy = Policy(info.name, cluster, wanted, engine, tokens)
    if tokens is not None and engine.ratio_of != "vision":
        raise KVCompressError(f"method {info.name!r} drops vision tokens only: ratio_of='vision', not 'prompt'")
    _check_combination(policy, info, scored_by)
    if engine.context_tokens is not None and engine.scope != "context":
        raise KVCompressError(f"context_tokens={engine.context_tokens} needs scope='context'")
    if engine.decode_budget is not None and engine.decode_ratio is not None:
        raise KVCompressError("give either decode_budget= or decode_ratio=, not both")
    evicts = engine.decode_budget is not None or engine.decode_ratio is not None
    if evicts and engine.cache_implementation not in ("dynamic", "offloaded"):
        raise KVCompressError(
            f"decode_budget= and decode_ratio= do not go with cache_implementation={engine.cache_implementation!r}, "
            "which stores an entry once and for all; dynamic and offloaded do"
        )
    if engine.prefill_chunk is not None:
        _check_prefill_chunk(policy)
    _check_storage(engine, [name for name in STORAGE_OPTIONS if getattr(engine, name) != getattr(Engine, name)])
    return policy


def _check_storage(engine: Engine, given: list[str]) -> None:
    """Check that the storage options that were `given` fit together and their packages are installed."""
    for name in given:
        kind = {"kv": "quantized", "key": "think"}.get(name.partition("_")[0], engine.cache_implementation)
        if kind != engine.cache_implementation:
            raise KVCompressError(f"{name}= needs cache_implementation={kind!r}")
    if engine.cache_implementation != "quantized":
        return
    if engine.kv_backend != "turboquant":
        engine.quantizer.check()
    else:
        check_bits(engine.kv_backend, engine.kv_bits)
        if of_groups := {"kv_group_size", "kv_residual"} & set(given):
            raise KVCompressError(f"{min(of_groups)}= is not for kv_backend='turboquant', which packs each entry alone")


def _check_combination(policy: Policy, info: MethodInfo, scored_by: MethodInfo) -> None:
    """Check that the method, the scorer, the layer budget and the merge fit together."""

    def overrides(cls: type[KVCluster], *names: str) -> bool:
        return any(getattr(cls, name) is not getattr(KVCluster, name) for name in names)

    if scored_by is not info and (overrides(info.cls, "keep", "select", "update_kv") or info.name == "full"):
        raise KVCompressError(f"method {info.name!r} chooses by more than scores: it takes no scorer=")
    if scored_by is not info and (overrides(scored_by.cls, "update_kv") or scored_by.name == "full"):
        raise KVCompressError(f"method {scored_by.name!r} cannot be a scorer: it does not choose by scores")
    if policy.known_layer_budget and policy.chosen("layer_budget") != policy.cluster.layer_budget:
        raise KVCompressError(
            f"layer_budget={policy.chosen('layer_budget')!r} does not go with calibration=, which says what each layer "
            "keeps"
        )
    if policy.layer_budget.is_measured and overrides(scored_by.cls, "update_kv"):
        raise KVCompressError(
            f"method {scored_by.name!r} takes no layer_budget={policy.chosen('layer_budget')!r}, which is known only "
            "after the last layer: it chooses at once"
        )
    if policy.cluster.reads_hidden and policy.layer_budget.asks_queries:
        raise KVCompressError(
            f"method {scored_by.name!r} takes no layer_budget={policy.chosen('layer_budget')!r}, which looks at queries"
        )
    if policy.moves_keys and policy.decode is not None:
        # The keys noted before they were moved would undo a merge, or would be taken for the method's own note.
        for conflict, is_there in (
            (f"merge={policy.chosen('merge')!r}", policy.chosen("merge") != "none"),
            (f"method {scored_by.name!r}, which takes notes", overrides(scored_by.cls, "note")),
            (f"method {scored_by.name!r}, which uses future queries", policy.cluster.foresees),
        ):
            if is_there:
                raise KVCompressError(f"positions='cache' does not go with {conflict} while decoding evicts")
    merges = ["none", *MERGES]
    if policy.chosen("merge") not in merges:
        raise unknown_name("there is no merge", policy.chosen("merge"), merges)
    if policy.engine.merge_modality != "any" and policy.chosen("merge") == "none":
        raise KVCompressError(f"merge_modality={policy.engine.merge_modality!r} needs merge=")


def _check_prefill_chunk(policy: Policy) -> None:
    """Check that entries can be chosen again after each chunk."""
    engine = policy.engine
    conflicts = {
        f"cache_implementation={engine.cache_implementation!r}, which stores an entry once and for all; dynamic and "
        "offloaded do": engine.cache_implementation not in ("dynamic", "offloaded"),
        "scope='context': a chunk does not know where the question begins": engine.scope != "prompt",
        "ratio_of='vision'": engine.ratio_of != "prompt",
        f"method {policy.method!r}, which chooses by the whole prompt": (
            policy.cluster.whole_prompt or policy.cluster.second_pass
        ),
        f"layer_budget={policy.chosen('layer_budget')!r}, which depends on the whole prompt": (
            policy.layer_budget.is_measured
        ),
        "positions='cache', which moves the keys of one prompt": policy.moves_keys,
    }
    for conflict, is_there in conflicts.items():
        if is_there:
            raise KVCompressError(f"prefill_chunk={engine.prefill_chunk} does not go with {conflict}")


def check_tensor_parallel(policy: Policy) -> None:
    """Check that each process can compress its own KV heads. Raises KVCompressError."""
    conflicts = {
        f"method {policy.method!r} with calibration=, which covers all heads": (
            getattr(policy.cluster, "calibration", None) is not None
        ),
        f"method {policy.method!r}, which chooses for all heads together": (
            policy.tokens is not None or policy.cluster.mixes_heads
        ),
        f"head_budget={policy.head_budget!r}": policy.head_budget != "uniform",
        f"layer_budget={policy.chosen('layer_budget')!r}, which is measured over all heads": (
            policy.layer_budget.is_measured
        ),
        "merge='cam', which draws for all heads together": policy.chosen("merge") == "cam",
        f"merge={policy.chosen('merge')!r}, which compares all heads": policy.chosen("merge") in ("weighted", "meda"),
    }
    for conflict, is_there in conflicts.items():
        if is_there:
            raise KVCompressError(f"tensor parallel: with KV heads in other processes there is no {conflict}")


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
