"""The model and the greedy loop, also run by kvpress's process: imports only torch and transformers, even old ones."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

# As in ../cache_name.py, which this process cannot import.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"

# `cpu` is the process's CPU time: with one thread, the time on an otherwise idle machine.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


MEASURED = ("cpu", "cuda", "mps")  # kinds of devices that `synchronise` waits for


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def load(source: dict[str, Any], dtype: str, device: torch.device) -> PreTrainedModel:
    """Load the model of a `source`.

    The source is {"pretrained": hub id or path}, or {"config": a config's fields with its model_type} for random
    weights. These are created on the device, and are the same wherever torch is."""
    kind = getattr(torch, dtype)
    if "config" in source:
        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**source["config"]), dtype=kind).eval()
    config = AutoConfig.from_pretrained(source["pretrained"])
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return auto.from_pretrained(source["pretrained"], dtype=kind).eval().to(device)


def prompt_ids(model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    """Return random token ids (batch, length), the same in every process.

    They are from the lower half of the vocabulary, because image placeholders have high ids."""
    vocabulary = model.config.get_text_config().vocab_size // 2
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(model.device)


@torch.no_grad()
def read_prompt(model: PreTrainedModel, cache: Any, ids: torch.Tensor, clock: str) -> tuple[torch.Tensor, float]:
    """Prefill, and return the first new token (batch, 1) and the milliseconds."""
    now = CLOCKS[clock]
    synchronise(ids.device)
    start = now()
    token = model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits[:, -1:].argmax(-1)
    synchronise(ids.device)
    return token, (now() - start) * 1e3


@torch.no_grad()
def decode(
    step: Callable[..., Any], cache: Any, token: torch.Tensor, length: int, steps: int, clock: str
) -> list[float]:
    """Decode `steps` tokens after `length` tokens and return the milliseconds of each step.

    Every step ends with a synchronisation, since `generate` also looks at each token before the next step. No token
    ends the answer."""
    now, times = CLOCKS[clock], []
    synchronise(token.device)
    start = now()
    for position in range(length, length + steps):
        positions = torch.full_like(token, position)
        token = step(token, position_ids=positions, use_cache=True, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        synchronise(token.device)
        times.append(now())
    return [(after - before) * 1e3 for before, after in zip([start, *times], times, strict=False)]
