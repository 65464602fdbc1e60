"""Everything that the user asked for, checked: the method and its options, how much is kept, of what, and when."""

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from .budget import Budget
from .clusters.base import KVCluster, MethodInfo, make_cluster, method_info
from .errors import KVCompressError, unknown_name, validated
from .quantization import Quantizer

Fraction = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class Engine:
    """What applies to every method. Each field is an option of `compress`, `CompressedCache` and the plugin.

    Attributes:
        head_budget: `uniform`: each KV head keeps as much; `adaptive`: the heads of a row share one budget and keep
            as their scores deserve (AdaKV). None: what the method prescribes, uniform for most.
        safeguard: with adaptive heads, the part of its even share that each head is sure of.
        scope: `prompt`: the whole prompt is scored and compressed, the question steers the selection; `context`: only
            what precedes the question, up to the last image or video token of the row or up to `context_tokens`.
        context_tokens: for `scope=context`, how many leading tokens of each row are the context; negative: all but
            that many.
        ratio_of: what the ratio or budget refers to: `prompt`: all entries in the scope; `vision`: image and video
            tokens, only these are evicted and text is kept.
        first_token: `full`: the answer's first token comes from the prompt pass, which attends over everything (as
            with every peer); `compressed`: the last prompt token is fed again on the compressed cache.
        decode_budget, decode_ratio: entries, or the fraction of the row's tokens, that are kept while decoding;
            neither: every decoded token is kept.
        decode_interval: decode steps from one eviction to the next; None: what the method prescribes.
        cache_implementation: `dynamic`: buffers grow where they must; `static`: after the prompt the entries move into
            buffers of a fixed shape, with room for `max_new_tokens`, so that decoding can run as one compiled graph;
            `offloaded`, `offloaded_static`: the same in the CPU's memory, fetched one layer ahead (not compiled);
            `quantized`: kept entries are stored in `kv_bits`, once, and decoded ones whenever `kv_residual` are there.
        kv_bits, kv_backend, kv_group_size, kv_residual: for `quantized`: bits per number, `quanto` or `hqq`, numbers
            that share a scale, decoded tokens that wait in full precision.
    """

    head_budget: Literal["uniform", "adaptive"] | None = None
    safeguard: Annotated[float, Field(ge=0, le=1)] = 0.2
    scope: Literal["prompt", "context"] = "prompt"
    context_tokens: int | None = None
    ratio_of: Literal["prompt", "vision"] = "prompt"
    first_token: Literal["full", "compressed"] = "full"
    decode_budget: PositiveInt | None = None
    decode_ratio: Fraction | None = None
    decode_interval: PositiveInt | None = None
    cache_implementation: Literal["dynamic", "static", "offloaded", "offloaded_static", "quantized"] = "dynamic"
    kv_bits: PositiveInt = 4
    kv_backend: Literal["quanto", "hqq"] = "quanto"
    kv_group_size: PositiveInt = 64
    kv_residual: PositiveInt = 128

    @property
    def quantizer(self) -> Quantizer:
        return Quantizer(self.kv_backend, self.kv_bits, self.kv_group_size)


STORAGE_OPTIONS = ("cache_implementation", "kv_bits", "kv_backend", "kv_group_size", "kv_residual")
FULL_OPTIONS = ("first_token", *STORAGE_OPTIONS)  # the others say how to compress


def all_options(info: MethodInfo) -> dict[str, object]:
    """Every option that a method takes, its own and the engine's, with its default."""
    engine = {field.name: field.default for field in fields(Engine)}
    if info.name == "full":
        return {**info.options, **{name: engine[name] for name in FULL_OPTIONS}}
    return {**info.options, **engine, "head_budget": info.cls.head_budget, "decode_interval": info.cls.decode_interval}


@dataclass(frozen=True)
class Policy:
    """A cluster, its budget, and the engine's options, with the method's own choices filled in."""

    method: str
    cluster: KVCluster
    budget: Budget
    engine: Engine

    @property
    def head_budget(self) -> str:
        return self.engine.head_budget or self.cluster.head_budget

    @property
    def decode_interval(self) -> int:
        return self.engine.decode_interval or self.cluster.decode_interval

    @property
    def options(self) -> dict[str, object]:
        """Every option of the method with the value in force, as in `all_options`."""
        given = {**asdict(self.cluster), **asdict(self.engine)}
        own = {"head_budget": self.head_budget, "decode_interval": self.decode_interval}
        return {name: own.get(name, given[name]) for name in all_options(method_info(self.method))}

    @property
    def decode(self) -> Budget | None:
        """The budget while decoding, None where every decoded token is kept."""
        if self.engine.decode_budget is None and self.engine.decode_ratio is None:
            return None
        return Budget(self.engine.decode_ratio, self.engine.decode_budget)


def make_policy(
    method: str | None = None, ratio: float | None = None, budget: int | None = None, **options: object
) -> Policy:
    """Check and combine what the user gave; `options` are the method's and the engine's. Raises KVCompressError."""
    info = method_info(method)
    for name in options:
        if name not in all_options(info):
            raise unknown_name(f"method {info.name!r} has no option", name, all_options(info))
    own = {name: value for name, value in options.items() if name in info.options}
    cluster = make_cluster(method, **own)
    engine = validated(Engine, "option", {name: value for name, value in options.items() if name not in own})
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
    if engine.cache_implementation == "quantized":
        engine.quantizer.check()
    elif given := [name for name in STORAGE_OPTIONS[1:] if name in options and options[name] != getattr(Engine, name)]:
        raise KVCompressError(f"{given[0]}= needs cache_implementation='quantized'")
    return Policy(info.name, cluster, method_budget(info.name, ratio, budget), engine)


def method_budget(method: str | None, ratio: float | None, budget: int | None) -> Budget:
    """The budget of a method. `full` keeps all, so it takes no other; every other method needs one."""
    name = method_info(method).name
    if name != "full":
        if ratio is None and budget is None:
            raise KVCompressError(f"method {name!r} needs ratio= (fraction kept, in (0, 1]) or budget= (entries kept)")
        return Budget(ratio, budget)
    if budget is not None or ratio not in (None, 1):
        raise KVCompressError(f"method 'full' compresses nothing: ratio={ratio}, budget={budget} cannot be honoured")
    return Budget(ratio=1.0)
