"""How a task's answers are generated: the `generation_kwargs` of its YAML, updated with `--gen_kwargs`."""

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from transformers import GenerationConfig

from kvcompress import KVCompressError
from kvcompress.errors import unknown_name
from kvcompress.inflight.request import ONE_SEQUENCE

from .arguments import Arguments, validated

# Keys in lmms-eval's task files that are not arguments of `generate` but meant for other wrappers or request types.
IGNORED_GENERATION_KEYS = ("image_aspect_ratio", "visual_cot", "max_agentic_steps")
STOP_STRING_KEYS = ("until", "stop_sequences", "stop_strings")  # lmms-eval's, vLLM's, transformers'
DEFAULT_UNTIL = ["\n\n"]  # lmms-eval's default for tasks without stop strings
NO_LIKELIHOOD = (
    "a likelihood is computed in one prefill over a given answer, which KV compression does not change: no token is "
    "generated from the compressed cache"
)


Share = Annotated[float, Field(ge=0, le=1)]


class GenerationArguments(Arguments):
    """Arguments of `generate` that it does not check, or checks only at the first question.

    None means the default. Other arguments pass through unchecked.
    """

    model_config = ConfigDict(extra="allow")

    do_sample: bool | None = None
    temperature: NonNegativeFloat | None = None
    top_k: NonNegativeInt | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    epsilon_cutoff: Share | None = None
    eta_cutoff: Share | None = None
    max_new_tokens: PositiveInt | None = None
    min_new_tokens: NonNegativeInt | None = None
    max_length: PositiveInt | None = None
    min_length: NonNegativeInt | None = None
    max_time: PositiveFloat | None = None
    num_beams: PositiveInt | None = None
    num_return_sequences: Literal[1] | None = None
    early_stopping: bool | Literal["never"] | None = None
    length_penalty: float | None = None
    repetition_penalty: PositiveFloat | None = None
    encoder_repetition_penalty: PositiveFloat | None = None
    no_repeat_ngram_size: NonNegativeInt | None = None
    encoder_no_repeat_ngram_size: NonNegativeInt | None = None
    guidance_scale: PositiveFloat | None = None
    renormalize_logits: bool | None = None
    remove_invalid_values: bool | None = None
    use_cache: Literal[True] | None = None
    seed: NonNegativeInt | None = None
    skip_special_tokens: bool | None = None


@cache
def argument_names() -> frozenset[str]:
    """Return the names of all generation arguments that a task may set."""
    own = (name for name in GenerationConfig().to_dict() if not name.startswith("_"))
    return frozenset({*own, *STOP_STRING_KEYS, "seed", "skip_special_tokens"})


def check_generation(given: dict[str, Any]) -> dict[str, Any]:
    """Check the arguments of `generate` and return them. Raises KVCompressError for a bad value or unknown name."""
    for name in given:
        if name not in argument_names():
            raise unknown_name("there is no generation argument", name, argument_names())
    return validated(GenerationArguments, **given).model_dump(include=set(given))


def check_one_sequence(slots: int | str | None, arguments: dict[str, Any]) -> None:
    """Raise KVCompressError if these arguments generate several sequences per request, which `slots` do not support."""
    for name in ONE_SEQUENCE:
        if slots is not None and (arguments.get(name) or 1) > 1:
            raise KVCompressError(f"slots={slots!r} does not go with {name}={arguments[name]}: it has to be 1")


@dataclass(frozen=True)
class Generation:
    """How a task's answers are generated.

    Attributes:
        arguments: the arguments of `generate`.
        until: stop strings; an answer ends before the first of them.
        seed: seed for sampling; None does not seed torch's generator.
        skip_special_tokens: whether the answer's text omits special tokens.
    """

    arguments: dict[str, Any]
    until: list[str]
    seed: int | None = None
    skip_special_tokens: bool = True

    def cut(self, text: str) -> str:
        """Cut an answer at its first stop string."""
        for stop in filter(None, self.until):
            text = text.split(stop, 1)[0]
        return text


def _stop_strings(key: str, given: Any) -> list[str]:
    """Return one stop string or a list of them as a list; one from a command line may have been read as a number."""
    stops = given if isinstance(given, list | tuple) else [given]
    if any(isinstance(stop, bool) for stop in stops):
        raise KVCompressError(f"{key}={stops} is not text")
    return [str(stop) for stop in stops if stop not in (None, "")]


def generation_of(task_kwargs: dict[str, Any], max_new_tokens: int) -> Generation:
    """Interpret a task's generation kwargs (including those of `--gen_kwargs`).

    Decoding is greedy unless `do_sample=True`, or `do_sample` is absent and the temperature is above 0; a temperature
    of 0 is always greedy. `max_new_tokens` is the default for tasks that set none. Only stop strings that the task
    itself names count. Other keys go to `generate` unchanged. Raises KVCompressError for a key unknown to `generate`.
    """
    kwargs = {key: value for key, value in task_kwargs.items() if key not in IGNORED_GENERATION_KEYS}
    stops = {key: _stop_strings(key, kwargs.pop(key, None)) for key in STOP_STRING_KEYS}
    if stops["until"] == DEFAULT_UNTIL:
        stops["until"] = []
    kwargs["max_new_tokens"] = kwargs.get("max_new_tokens") or max_new_tokens
    temperature = kwargs.get("temperature")
    kwargs["do_sample"] = bool(kwargs.get("do_sample", temperature)) and temperature != 0
    if not kwargs["do_sample"]:
        kwargs |= {"temperature": None, "top_p": None, "top_k": None}  # else generate warns about the checkpoint's
    kwargs = check_generation(kwargs)
    seed, skips = kwargs.pop("seed", None), kwargs.pop("skip_special_tokens", None)
    return Generation(kwargs, list(dict.fromkeys(chain.from_iterable(stops.values()))), seed, skips is not False)
