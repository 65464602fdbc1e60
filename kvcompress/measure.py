"""The cost of one `generate` call: time to first token, time per output token, KV bytes, peak memory; and the largest
tensor of any code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from .device import device_of, now, peak_memory, reset_peak_memory, synchronise
from .errors import KVCompressError
from .hooks.model import generation_option, unwrapped
from .hooks.session import Session
from .scoring.vision import vision_token_mask


@dataclass(frozen=True)
class Measurement:
    """The measurements of one batch through `generate`.

    Attributes:
        ttft_s: seconds from the call to the first new token: vision tower, prefill, compression, sampling.
        tpot_s: seconds per further token; None if there was only one.
        tokens_in, tokens_out, vision_tokens: per row, without pads; tokens_out ends with the end-of-sequence token.
        kv_bytes_prompt, kv_bytes_end: bytes allocated for the whole batch's cache after the prompt and at the end.
        kv_room_bytes: the part of those after the prompt that is reserved for new tokens; the rest holds keys, values
            and index.
        realised_ratios: fraction of each row's prompt entries that was kept, [compressed layer][row].
        peak_memory_bytes: peak device memory allocated during the call on CUDA, the sum of all GPUs' peaks; elsewhere
            the peak resident memory of the process, since the call if the kernel can reset the mark, otherwise since
            the process began.
    """

    ttft_s: float
    tpot_s: float | None
    tokens_in: list[int]
    tokens_out: list[int]
    vision_tokens: list[int]
    kv_bytes_prompt: int
    kv_bytes_end: int
    kv_room_bytes: int
    realised_ratios: list[list[float]]
    peak_memory_bytes: int


class TokenTimes(StoppingCriteria):
    """Stopping criteria that record the time of each new token, and never stop.

    `clock` returns seconds; None: the wall clock."""

    def __init__(self, clock: Callable[[], float] | None = None):
        self.clock = clock
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        wall = now(input_ids.device)
        self.times.append(wall if self.clock is None else self.clock())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class TokenClock(TokenTimes):
    """Also records the cache's bytes after the prompt, and when counting ended, to exclude it from token times."""

    def __init__(self, session: Session):
        super().__init__()
        self.session = session
        self.kv_bytes_prompt = self.kv_room_bytes = 0
        self.decoding_from = 0.0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        goes_on = super().__call__(input_ids, scores, **kwargs)
        if len(self.times) == 1:
            self.kv_bytes_prompt = self.session.cache.nbytes
            self.kv_room_bytes = self.session.cache.room_nbytes
            self.decoding_from = now(input_ids.device)
        return goes_on


@torch.no_grad()
def generate(
    model: PreTrainedModel, session: Session, inputs: dict[str, torch.Tensor], **generate_kwargs: object
) -> tuple[torch.LongTensor, Measurement]:
    """Measure `model.generate(**inputs, **generate_kwargs)` inside an entered `session`.

    Args:
        inputs: the processor's output, with `input_ids` (batch, columns), left-padded.
        generate_kwargs: arguments of `generate`, which must return sequences (the default), one per row.

    Returns:
        The new tokens (batch, new), without the prompt, and their measurements.

    Raises:
        KVCompressError: if the session belongs to another model or was left, or `generate` returns something else.
    """
    if not session.is_entered or unwrapped(model) is not session.model:
        raise KVCompressError("measuring needs a session of this very model, inside kvcompress.compress(...)")
    ids, device = inputs["input_ids"], device_of(model)
    mask = inputs.get("attention_mask")
    clock = TokenClock(session)
    criteria = StoppingCriteriaList([*(generate_kwargs.pop("stopping_criteria", None) or []), clock])
    end = generation_option(model, generate_kwargs, "eos_token_id")
    reset_peak_memory(device)
    start = now(device)
    sequences = model.generate(**inputs, stopping_criteria=criteria, **generate_kwargs)
    synchronise(device)
    if not isinstance(sequences, torch.Tensor) or len(sequences) != len(ids):
        raise KVCompressError("measuring needs generate to return one sequence per row, as a tensor")
    new = sequences[:, ids.shape[1] :]
    times = clock.times
    return new, Measurement(
        ttft_s=times[0] - start,
        tpot_s=(times[-1] - clock.decoding_from) / (len(times) - 1) if len(times) > 1 else None,
        tokens_in=[ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist(),
        tokens_out=answer_lengths(new, end),
        vision_tokens=vision_token_mask(model.config, ids).sum(1).tolist(),
        kv_bytes_prompt=clock.kv_bytes_prompt,
        kv_bytes_end=session.cache.nbytes,
        kv_room_bytes=clock.kv_room_bytes,
        realised_ratios=session.cache.realised_ratios(),
        peak_memory_bytes=peak_memory(device),
    )


def answer_lengths(new: torch.LongTensor, eos_token_id: int | list[int] | None) -> list[int]:
    """Count the tokens of each row of (batch, new) up to and including the first end-of-sequence token, if any."""
    if eos_token_id is None:
        return [new.shape[1]] * len(new)
    ends = torch.isin(new, torch.tensor(eos_token_id, device=new.device))
    before = (ends.cumsum(1) == 0).sum(1)
    return (before + ends.any(1)).tolist()


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation returned, except a model's weights and views of them."""

    def __init__(self, model: torch.nn.Module | None = None):
        super().__init__()
        self.numel = 0
        self.weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()} if model else set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.weights:
                self.numel = max(self.numel, tensor.numel())
        return result
