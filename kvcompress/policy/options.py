"""The options that every method accepts."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from ..kernels.quantization import Quantizer
from ..methods import MethodInfo, method_info
from ..tokens.base import TokenMethod
from .passages import as_setting

Fraction = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class Engine:
    """Options that apply to every method. Each field is an option of `compress`, `CompressedCache` and the plugin.

    Attributes:
        scorer: name of another method whose scores and options replace this method's own; this method then decides how
            budgets are shared out, and what is merged and when.
        layer_budget: how layers share the budget, a name in `list_layer_budgets()`. None: the method's default, uniform
            for most.
        pyramid_beta: for `layer_budget=pyramid`, the mean budget divided by the last layer's.
        head_budget: `uniform`: each KV head keeps equally many entries; `shared`: all heads of a layer keep the same
            tokens, those with the highest mean score; `adaptive`: the heads of a row share one budget by their scores
            (AdaKV); `adaptive-kvpress`: the same in kvpress's form. None: the method's default, uniform for most.
        positions: `true`: kept keys keep their rotation; `cache`: they are re-rotated to their position in the cache,
            as if there were no gaps between them (StreamingLLM, section 3.2; kvpress's KeyRerotationPress).
        safeguard: with adaptive heads, the part of the budget that is shared out evenly among them (kvpress: that each
            head is guaranteed). None: the method's default, 0.2 for most.
        merge: what happens to evicted entries. `none`: they are dropped; `average`, `pivot`, `weighted`, `meda`, `d2o`,
            `d2o-paper`: they are merged into the kept entries with the most similar keys; `cam`: an entry's value is
            added to the entries after it (see merging.py). None: the method's default.
        merge_modality: `any`, or `same`: vision is merged only into vision, text only into text.
        scope: `prompt`: the whole prompt is scored and compressed, and the question influences the selection;
            `context`: only the tokens before the question are, up to the row's last image or video token or up to
            `context_tokens`; `context-first`: the same, but the context passes through the model and is compressed
            before the question, which attends to what is kept of it (hooks/context_first.py).
        context_tokens: for the scopes `context` and `context-first`, the number of leading tokens of each row that are
            the context; negative: all but that many.
        ratio_of: what the ratio or budget refers to. `prompt`: all entries in the scope; `vision`: image and video
            tokens; of a prompt only these are evicted, text is kept. Evictions while decoding do not tell them apart.
        protect: tokens of the prompt that stay, inside the budget: `prompt`, `system`, `question`, `text`, `first:N`,
            `last:N`, `tokens:A-B`, joined by `+` (policy/spans.py). None: none but those that the method itself keeps.
        protect_text: text whose tokens stay, too: characters that each row of the first prompt has exactly once, or a
            list of them (on a command line, in JSON). It is found with `tokenizer=`. None: no text.
        fair: spans of the first prompt (`first:N`, `last:N`, `tokens:A-B`, joined by `+`). Of what may be evicted, each
            span and all other tokens together keep the same share when the prompt is compressed. None: no spans.
        first_token: `full`: the answer's first token comes from the prefill, which attends to everything (as in all
            comparable projects); `compressed`: the last prompt token is fed again on the compressed cache.
        prefill_chunk: the most prompt tokens that pass through the language model at once. After each chunk, everything
            stored so far is compressed to the budget of the tokens seen so far (hooks/chunked_prefill.py). None: a
            prompt is processed in one piece, and a second prompt on a filled cache has its own budget.
        decode_budget, decode_ratio: entries, or the fraction of the row's tokens, that are kept while decoding.
            Neither: every decoded token is kept.
        decode_interval: decode steps between evictions. None: the method's default.
        cache_implementation: `dynamic`: buffers grow as needed; `static`: after the prompt, the entries move into
            buffers of fixed shape, with room for `max_new_tokens`, so that decoding can run as one compiled graph;
            `offloaded`: in CPU memory, fetched one layer ahead; `offloaded_static`: as well, with room for
            `max_new_tokens` and no more; `quantized`: entries are stored once, in `kv_bits`; `think`: keys lose
            channels (docs/low-bits.md).
        kv_bits, kv_backend: for `quantized`, bits per number, and `quanto`, `hqq`, `turboquant` or `fp8`,
            which has 8 bits, also by default.
        kv_group_size, kv_residual: for `quanto` and `hqq`, the numbers that share a scale, and the decoded tokens that
            wait in full precision.
        key_channels, key_recent: for `think`, the part of each KV head's channels that keys keep, and the number of
            latest prompt entries that keep all channels.
    """

    scorer: str | None = None
    layer_budget: str | None = None
    pyramid_beta: Annotated[float, Field(ge=1)] = 20.0
    head_budget: Literal["uniform", "shared", "adaptive", "adaptive-kvpress"] | None = None
    safeguard: Annotated[float, Field(ge=0, le=1)] | None = None
    positions: Literal["true", "cache"] = "true"
    merge: str | None = None
    merge_modality: Literal["any", "same"] = "any"
    scope: Literal["prompt", "context", "context-first"] = "prompt"
    context_tokens: int | None = None
    ratio_of: Literal["prompt", "vision"] = "prompt"
    protect: str | None = None
    protect_text: Annotated[str | None, BeforeValidator(as_setting)] = None
    fair: str | None = None
    first_token: Literal["full", "compressed"] = "full"
    prefill_chunk: PositiveInt | None = None
    decode_budget: PositiveInt | None = None
    decode_ratio: Fraction | None = None
    decode_interval: PositiveInt | None = None
    cache_implementation: Literal["dynamic", "static", "offloaded", "offloaded_static", "quantized", "think"] = (
        "dynamic"
    )
    kv_bits: PositiveInt = 4
    kv_backend: Literal["quanto", "hqq", "turboquant", "fp8"] = "quanto"
    kv_group_size: PositiveInt = 64
    kv_residual: PositiveInt = 128
    key_channels: Fraction = 0.6
    key_recent: NonNegativeInt = 32

    @property
    def quantizer(self) -> Quantizer:
        return Quantizer(self.kv_backend, self.kv_bits, self.kv_group_size)


STORAGE_OPTIONS = (
    "cache_implementation", "kv_bits", "kv_backend", "kv_group_size", "kv_residual", "key_channels", "key_recent",
)  # fmt: skip
FULL_OPTIONS = ("first_token", "prefill_chunk", *STORAGE_OPTIONS)  # the others define how to compress
TOKEN_OPTIONS = ("first_token", *STORAGE_OPTIONS)


PRESCRIBED = ("layer_budget", "head_budget", "safeguard", "merge", "decode_interval")  # None: the method's default
TAKEN = {"method", "ratio", "budget", "preset", *(field.name for field in fields(Engine))} - {*PRESCRIBED}


def all_options(info: MethodInfo, scorer: str | None = None) -> dict[str, object]:
    """Return every option that a method accepts, with its default: the method's own and the engine's.

    With a `scorer`, its options replace the method's own. `preset` is included if the method has presets and no
    `scorer` is given."""
    engine = {field.name: field.default for field in fields(Engine)}
    if info.name == "full":
        return {**info.options, **{name: engine[name] for name in FULL_OPTIONS}}
    own = info.options if scorer is None else method_info(scorer).options
    if info.presets and scorer is None:
        own = {**own, "preset": None}
    if issubclass(info.cls, TokenMethod):
        return {**own, **{name: engine[name] for name in TOKEN_OPTIONS}, "ratio_of": "vision"}
    return {**own, **engine, **{part: getattr(info.cls, part) for part in PRESCRIBED}}
