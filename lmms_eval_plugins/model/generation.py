"""How a task wants its answers generated: its YAML's `generation_kwargs`, with those of `--gen_kwargs`."""

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

# Keys in lmms-eval's task files that are no argument of `generate`: for other wrappers, or for other request types.
IGNORED_GENERATION_KEYS = ("image_aspect_ratio", "visual_cot", "max_agentic_steps")
STOP_STRING_KEYS = ("until", "stop_sequences", "stop_strings")  # lmms-eval's, vLLM's, transformers'
DEFAULT_UNTIL = ["\n\n"]  # what lmms-eval fills in where a task names no stop string
NO_LIKELIHOOD = (
    "a likelihood is computed in one prefill of a given answer, which KV compression does not change: no token is "
    "generated from the compressed cache"
)


Share = Annotated[float, Field(ge=0, le=1)]


class GenerationArguments(Arguments):
    """Arguments of `generate` whose values can be wrong without its noticing, or noticed only at the first question.

    None is the default. Others go through as they are.
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
    """Of what a task may say of its answers' generation."""
    return frozenset({*GenerationConfig().to_dict(), *STOP_STRING_KEYS, "seed", "skip_special_tokens"})


def check_generation(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` with their values checked. Raises KVCompressError for an unknown one too."""
    for name in given:
        if name not in argument_names():
            raise unknown_name("there is no generation argument", name, argument_names())
    return validated(GenerationArguments, **given).model_dump(include=set(given))


def check_one_sequence(slots: int | str | None, arguments: dict[str, Any]) -> None:
    """Raises KVCompressError where these arguments of `generate` make a request several sequences, and requests are to
    have `slots`."""
    for name in ONE_SEQUENCE:
        if slots is not None and (arguments.get(name) or 1) > 1:
            raise KVCompressError(f"slots={slots!r} does not go with {name}={arguments[name]}: it has to be 1")


@dataclass(frozen=True)
class Generation:
    """How a task wants its answers generated.

    Attributes:
        arguments: of `generate`.
        until: an answer ends before the first of these strings.
        seed: of sampling; None leaves torch's generator as it is.
        skip_special_tokens: whether special tokens are left out of the answer's text.
    """

    arguments: dict[str, Any]
    until: list[str]
    seed: int | None = None
    skip_special_tokens: bool = True

    def cut(self, text: str) -> str:
        """An answer up to the first of the strings that end it."""
        for stop in filter(None, self.until):
            text = text.split(stop, 1)[0]
        return text


def generation_of(task_kwargs: dict[str, Any], max_new_tokens: int) -> Generation:
    """A task's generation kwargs (with those of `--gen_kwargs`), as they are understood here.

    Greedy unless `do_sample=True`, or a temperature above 0 without `do_sample`; a temperature of 0 is greedy.
    `max_new_tokens` is the default for tasks that set none. Stop strings are those the task itself names. Other
    keys go to `generate` as they are. Raises KVCompressError for a key that `generate` does not have.
    """
    kwargs = {key: value for key, value in task_kwargs.items() if key not in IGNORED_GENERATION_KEYS}
    stops = {key: kwargs.pop(key, None) or [] for key in STOP_STRING_KEYS}
    stops = {key: [stop] if isinstance(stop, str) else list(stop) for key, stop in stops.items()}
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
