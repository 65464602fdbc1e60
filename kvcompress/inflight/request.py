"""A request, the sampling of its tokens, and its answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from ..cache.cache import CompressedCache
from ..cache_name import CACHE
from ..device import device_of, on_device
from ..errors import KVCompressError
from ..hooks.model import generation_option

ONE_SEQUENCE = ("num_beams", "num_return_sequences", "num_beam_groups")
ONLY_TOKENS = "an Answer holds tokens, and nothing else that generate returns"
LENGTHS = ("max_new_tokens", "max_length")
NOT_IN_FLIGHT = {  # options of `generate` -> why requests in flight do not take them
    "assistant_model": "a request in flight is decoded greedily or sampled",
    "streamer": "Request.on_tokens gets a request's tokens",
    "output_scores": ONLY_TOKENS,
    "output_logits": ONLY_TOKENS,
    "output_attentions": ONLY_TOKENS,
    "output_hidden_states": ONLY_TOKENS,
    "return_dict_in_generate": ONLY_TOKENS,
}


@dataclass
class Request:
    """One prompt with its own generation options.

    Attributes:
        inputs: model inputs, as a processor returns them for a batch of one.
        options: options of `generate` that override those of all requests: `max_new_tokens`, `do_sample`,
            `temperature`, `stop_strings`, ...
        seed: seed for sampling this request; None uses torch's global generator.
        on_tokens: called after each token with all tokens so far; if it returns True, the answer ends there and the
            slot is free. A request that lost its slot for want of memory begins again with its first token.
        is_wanted: asked before each piece of the prompt is prefilled; if it returns False, the request ends there with
            an error.
    """

    inputs: Mapping[str, torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    on_tokens: Callable[[list[int]], bool] | None = None
    is_wanted: Callable[[], bool] | None = None


@dataclass(frozen=True)
class Answer:
    """The result of a request. Seconds and bytes are the request's own, as far as they can be separated.

    Attributes:
        index: the request's index, from 0.
        tokens: LongTensor (new,) on the CPU, the end-of-sequence token included; empty if there is an error.
        error: the error that ended the request, or None.
        waited_s: seconds from the first request's start to this one's.
        ttft_s: seconds from its start to its first token.
        tpot_s: seconds per further token, other requests' prefills included; None if there is only one token.
        pause_s: the longest time between two of its tokens; None if there is only one.
        tokens_in: tokens of the prompt.
        kv_bytes_prompt: bytes held after the prompt, without room for new tokens.
        realised_ratios: fraction of the prompt's entries that was kept, by compressed layer.
    """

    index: int
    tokens: torch.LongTensor
    error: Exception | None = None
    waited_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    pause_s: float | None = None
    tokens_in: int = 0
    kv_bytes_prompt: int = 0
    realised_ratios: list[float] = field(default_factory=list)


class TokenSampler:
    """Chooses one request's tokens and decides when it ends, with transformers' own processors and criteria.

    Attributes:
        config: the generation config that `generate` made of its options.
        room: the most tokens that can be generated.
        is_greedy: whether each token is the most likely one, whatever came before.
    """

    def __init__(
        self,
        input_ids: torch.LongTensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        request: Request,
    ):
        """Other arguments are as `generate` passes them to its loop; `input_ids` are (1, columns), of which embeddings
        have none."""
        for name in ONE_SEQUENCE:
            if (getattr(config, name, None) or 1) > 1:
                raise KVCompressError(
                    f"{name}={getattr(config, name)}: a request in flight is one sequence, so it must be 1"
                )
        if (mode := config.get_generation_mode()) not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise KVCompressError(f"a request in flight is decoded greedily or sampled, not by {mode.value}")
        self.config = config
        self._ids, self._processors, self._samples = input_ids, processors, config.do_sample
        # Lengths and end tokens are checked on the host, so that each step waits for the device only once.
        self._ends, self._criteria, longest = set(), StoppingCriteriaList(), None
        for each in criteria:
            if type(each) is MaxLengthCriteria:
                longest = each.max_length
            elif type(each) is EosTokenCriteria:
                self._ends |= set(each.eos_token_id.flatten().tolist())
            else:
                self._criteria.append(each)
        self.room = (config.max_length if longest is None else longest) - input_ids.shape[1]
        self.tokens: list[int] = []
        self.is_greedy = not self._samples and not processors
        self._on_tokens, seed = request.on_tokens, request.seed
        self._generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)

    def next_token(self, logits: torch.Tensor) -> int:
        """Choose the next token from logits (vocabulary,)."""
        scores = self._processors(self._ids, logits[None].to(torch.float32, copy=True))
        if not self._samples:
            return int(scores.argmax(-1))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def add(self, token: int) -> bool:
        """Append a token; return True if it is the last."""
        self.tokens.append(token)
        if not self.is_greedy or self._criteria:
            new = on_device([[token]], self._ids.device)
            self._ids = torch.cat([self._ids, new], dim=1)
        is_over = token in self._ends or len(self.tokens) >= self.room
        if self._on_tokens is not None:
            is_over = bool(self._on_tokens(self.tokens)) or is_over
        return bool(self._criteria and self._criteria(self._ids, None).any()) or is_over


def prepare(
    model: PreTrainedModel, request: Request, options: Mapping[str, Any], cache: CompressedCache
) -> tuple[dict[str, Any], TokenSampler]:
    """Return the inputs of a prompt's first forward pass, as `generate` prepares them, and how tokens are chosen.

    Args:
        options: options of `generate` for all requests.
        cache: an empty cache for the prompt.
    """
    found: list[tuple[dict[str, Any], TokenSampler]] = []

    def first_step(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        sampler = TokenSampler(input_ids, logits_processor, stopping_criteria, generation_config, request)
        if len(input_ids) != 1:
            raise KVCompressError(
                f"a request has a batch of {len(input_ids)}: pass each sequence as a request of its own"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and not mask.all():
            raise KVCompressError("a request has pads: pass each prompt without padding")
        if sampler.room < 1:
            raise KVCompressError(f"there is no room for a new token: max_new_tokens={sampler.room}")
        inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **kwargs)
        found.append((inputs, sampler))
        return input_ids

    device = device_of(model)
    inputs = {name: value.to(device) if hasattr(value, "to") else value for name, value in request.inputs.items()}
    if names_length(request.options):  # in a way of its own: `generate` would prefer `max_new_tokens`
        options = {name: value for name, value in options.items() if name not in LENGTHS}
    if request.options.get("max_length") is not None:
        options["max_new_tokens"] = None  # also that of a generation config
    options = with_stop_strings(model, {**options, **request.options})
    for name, reason in NOT_IN_FLIGHT.items():
        if options.get(name):
            raise KVCompressError(f"{name}= does not go with requests in flight: {reason}")
    model.generate(**inputs, **options, **{CACHE: cache}, custom_generate=first_step)
    return found[0]


def names_length(options: Mapping[str, Any]) -> bool:
    """Return whether options of `generate` say how long an answer may be."""
    config = options.get("generation_config")
    return any(options.get(name, getattr(config, name, None)) is not None for name in LENGTHS)


def with_stop_strings(model: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
    """Convert `stop_strings`, also those of a generation config, and `tokenizer` to a criterion, since transformers
    drops the tokenizer with `custom_generate`."""
    tokenizer, strings = options.pop("tokenizer", None), generation_option(model, options, "stop_strings")
    if strings is None:
        return options
    if tokenizer is None:
        raise KVCompressError("stop_strings= needs tokenizer=, the model's")
    criteria = [*(options.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
    return {**options, "stop_strings": None, "stopping_criteria": StoppingCriteriaList(criteria)}
