"""A request of many: what is asked, how its tokens are chosen, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from ..cache.cache import CompressedCache
from ..device import on_device
from ..errors import KVCompressError

WITHOUT_MEDIA = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
)
ONE_SEQUENCE = ("num_beams", "num_return_sequences", "num_beam_groups")


@dataclass
class Request:
    """One prompt with its own way of generating.

    Attributes:
        inputs: of the model, as a processor returns them for a batch of one.
        options: of `generate`, in place of those that all requests have: `max_new_tokens`, `do_sample`, `temperature`,
            `stop_strings`, ...
        seed: of this request's draws where it samples; None draws from torch's own generator.
    """

    inputs: Mapping[str, torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True)
class Answer:
    """What came of a request. Seconds and bytes are its own, as far as they can be told apart.

    Attributes:
        index: the request's place among all, from 0.
        tokens: LongTensor (new,) on the CPU, the end-of-sequence token included; empty where there is an error.
        error: what ended the request, or None.
        waited_s: from the first request's start to this one's.
        ttft_s: from its start to its first token.
        tpot_s: per further token, other requests' prefills included; None where there was none.
        pause_s: the longest between two of its tokens; None where there is one only.
        tokens_in: of the prompt.
        kv_bytes_prompt: held for it after the prompt, without room for what comes.
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


class TokenChoice:
    """How one request's tokens are chosen, and when it is over: transformers' own processors and criteria.

    Attributes:
        room: tokens that may come at most.
        is_greedy: whether the token is the most likely, whatever came before.
    """

    def __init__(
        self,
        input_ids: torch.LongTensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        seed: int | None,
    ):
        """Arguments as `generate` hands them to its loop; `input_ids` (1, columns)."""
        for name in ONE_SEQUENCE:
            if (getattr(config, name, None) or 1) > 1:
                raise KVCompressError(
                    f"{name}={getattr(config, name)}: a request in flight is one sequence; it takes 1"
                )
        self._ids, self._processors, self._samples = input_ids, processors, config.do_sample
        # Lengths and ends are counted on the host, so that the device is asked once per step.
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
        self._generator = None if seed is None else torch.Generator(input_ids.device).manual_seed(seed)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token, from logits (vocabulary,)."""
        scores = self._processors(self._ids, logits[None].to(torch.float32, copy=True))
        if not self._samples:
            return int(scores.argmax(-1))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def add(self, token: int) -> bool:
        """Note a token; True where it is the last."""
        self.tokens.append(token)
        if not self.is_greedy or self._criteria:
            new = on_device([[token]], self._ids.device)
            self._ids = torch.cat([self._ids, new], dim=1)
        is_over = token in self._ends or len(self.tokens) >= self.room
        return bool(self._criteria and self._criteria(self._ids, None).any()) or is_over


@dataclass
class Prompt:
    """A prompt that is ready for the model.

    Attributes:
        inputs: of its forward pass.
        choice: how it goes on.
        config: what `generate` made of its options.
        tokens_in: its tokens.
    """

    inputs: dict[str, Any]
    choice: TokenChoice
    config: GenerationConfig
    tokens_in: int

    def leave_media(self) -> None:
        """A first pass has made the embeddings, with which others go on: no image is encoded again."""
        self.inputs = {name: value for name, value in self.inputs.items() if name in WITHOUT_MEDIA}


def prepare(model: PreTrainedModel, request: Request, options: Mapping[str, Any], cache: CompressedCache) -> Prompt:
    """As `generate` prepares a prompt for its first forward pass.

    Args:
        options: of `generate`, for all requests.
        cache: an empty one, which will hold it.
    """
    found: list[Prompt] = []

    def first_step(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        choice = TokenChoice(input_ids, logits_processor, stopping_criteria, generation_config, request.seed)
        if len(input_ids) != 1:
            raise KVCompressError(
                f"a request has a batch of {len(input_ids)}: give each sequence as a request of its own"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and not mask.all():
            raise KVCompressError("a request has pads: give each as it is alone, without any")
        if choice.room < 1:
            raise KVCompressError(f"there is no room for a new token: max_new_tokens={choice.room}")
        inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **kwargs)
        found.append(Prompt(inputs, choice, generation_config, input_ids.shape[1]))
        return input_ids

    device = model.device
    inputs = {name: value.to(device) if hasattr(value, "to") else value for name, value in request.inputs.items()}
    options = with_stop_strings({**options, **request.options})
    model.generate(**inputs, **options, past_key_values=cache, custom_generate=first_step)
    return found[0]


def with_stop_strings(options: dict[str, Any]) -> dict[str, Any]:
    """`stop_strings` and `tokenizer` as a criterion: beside `custom_generate`, transformers loses the tokenizer."""
    strings, tokenizer = options.pop("stop_strings", None), options.pop("tokenizer", None)
    if strings is None:
        return options
    if tokenizer is None:
        raise KVCompressError("stop_strings= needs tokenizer=, the model's")
    criterion = StopStringCriteria(tokenizer, strings)
    return {**options, "stopping_criteria": StoppingCriteriaList([*options.get("stopping_criteria", []), criterion])}
