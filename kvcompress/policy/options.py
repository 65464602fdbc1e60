"""The options that every method takes."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from ..kernels.quantization import Quantizer
from ..methods import MethodInfo, method_info
from ..tokens.base import TokenMethod

Fraction = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class Engine:
    """What applies to every method. Each field is an option of `compress`, `CompressedCache` and the plugin.

    Attributes:
        scorer: name of another method whose scores, and options, take the place of this method's own; this method
            then says how budgets are shared out, what is merged, and when.
        layer_budget: how the budget is shared out over the layers: a name of `list_layer_budgets()`. None: what the
            method prescribes, uniform for most.
        pyramid_beta: for `layer_budget=pyramid`: the mean budget over the last layer's.
        head_budget: `uniform`: each KV head keeps as much; `shared`: all heads of a layer keep the same tokens, those
            with the highest mean score; `adaptive`: the heads of a row share one budget and keep as their scores
            deserve (AdaKV); `adaptive-kvpress`: in kvpress's form. None: what the method prescribes, uniform for most.
        positions: `true`: kept keys stay as they are rotated; `cache`: they are rotated anew to their place in the
            cache, as if nothing had stood between them (StreamingLLM, section 3.2; kvpress's KeyRerotationPress).
        safeguard: with adaptive heads, the part of the budget that is shared out evenly among them (kvpress: of which
            a head is sure). None: what the method prescribes, 0.2 for most.
        merge: what becomes of evicted entries: `none`: they are dropped; `average`, `pivot`, `weighted`, `meda`, `d2o`,
            `d2o-paper`: they are merged into the kept entries whose keys are most like theirs; `cam`: an entry's value
            goes to those behind it (see merging.py). None: what the method prescribes.
        merge_modality: `any`; `same`: vision is merged into vision and text into text only.
        scope: `prompt`: the whole prompt is scored and compressed, the question steers the selection; `context`: only
            what precedes the question, up to the last image or video token of the row or up to `context_tokens`.
        context_tokens: for `scope=context`, how many leading tokens of each row are the context; negative: all but
            that many.
        ratio_of: what the ratio or budget refers to: `prompt`: all entries in the scope; `vision`: image and video
            tokens, only these are evicted and text is kept.
        first_token: `full`: the answer's first token comes from the prefill, which attends over everything (as
            with every peer); `compressed`: the last prompt token is fed again on the compressed cache.
        prefill_chunk: most tokens of a prompt that pass through the language model at once. After each such chunk all
            that is stored, of this chunk and of those before it, is compressed down to the budget of the tokens seen so
            far (hooks/chunked_prefill.py). None: a prompt is one piece; one that follows on a filled cache has its own
            budget.
        decode_budget, decode_ratio: entries, or the fraction of the row's tokens, that are kept while decoding;
            neither: every decoded token is kept.
        decode_interval: decode steps from one eviction to the next; None: what the method prescribes.
        cache_implementation: `dynamic`: buffers grow where they must; `static`: after the prompt the entries move into
            buffers of a fixed shape, with room for `max_new_tokens`, so that decoding can run as one compiled graph;
            `offloaded`, `offloaded_static`: the same in the CPU's memory, fetched one layer ahead (not compiled);
            `quantized`: entries are stored in `kv_bits`, once.
        kv_bits, kv_backend: for `quantized`: bits per number; `quanto`, `hqq` or `turboquant`.
        kv_group_size, kv_residual: for `quanto` and `hqq`: numbers that share a scale, decoded tokens that wait in full
            precision.
    """

    scorer: str | None = None
    layer_budget: str | None = None
    pyramid_beta: Annotated[float, Field(ge=1)] = 20.0
    head_budget: Literal["uniform", "shared", "adaptive", "adaptive-kvpress"] | None = None
    safeguard: Annotated[float, Field(ge=0, le=1)] | None = None
    positions: Literal["true", "cache"] = "true"
    merge: str | None = None
    merge_modality: Literal["any", "same"] = "any"
    scope: Literal["prompt", "context"] = "prompt"
    context_tokens: int | None = None
    ratio_of: Literal["prompt", "vision"] = "prompt"
    first_token: Literal["full", "compressed"] = "full"
    prefill_chunk: PositiveInt | None = None
    decode_budget: PositiveInt | None = None
    decode_ratio: Fraction | None = None
    decode_interval: PositiveInt | None = None
    cache_implementation: Literal["dynamic", "static", "offloaded", "offloaded_static", "quantized"] = "dynamic"
    kv_bits: PositiveInt = 4
    kv_backend: Literal["quanto", "hqq", "turboquant"] = "quanto"
    kv_group_size: PositiveInt = 64
    kv_residual: PositiveInt = 128

    @property
    def quantizer(self) -> Quantizer:
        return Quantizer(self.kv_backend, self.kv_bits, self.kv_group_size)


STORAGE_OPTIONS = ("cache_implementation", "kv_bits", "kv_backend", "kv_group_size", "kv_residual")
FULL_OPTIONS = ("first_token", "prefill_chunk", *STORAGE_OPTIONS)  # the others say how to compress
TOKEN_OPTIONS = ("first_token", *STORAGE_OPTIONS)


PRESCRIBED = ("layer_budget", "head_budget", "safeguard", "merge", "decode_interval")  # None: the method's own choice


def all_options(info: MethodInfo, scorer: str | None = None) -> dict[str, object]:
    """Every option that a method takes, its own (with a `scorer` that one's) and the engine's, with its default;
    `preset` where the method has any (its options without a `scorer`)."""
    engine = {field.name: field.default for field in fields(Engine)}
    if info.name == "full":
        return {**info.options, **{name: engine[name] for name in FULL_OPTIONS}}
    own = info.options if scorer is None else method_info(scorer).options
    if info.presets and scorer is None:
        own = {**own, "preset": None}
    if issubclass(info.cls, TokenMethod):
        return {**own, **{name: engine[name] for name in TOKEN_OPTIONS}, "ratio_of": "vision"}
    return {**own, **engine, **{part: getattr(info.cls, part) for part in PRESCRIBED}}
