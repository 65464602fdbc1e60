"""The model and the greedy loop, which a peer's process runs too: imports torch and transformers only, old ones too."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

# `cpu` is the process's own time: with one thread, what an otherwise idle machine takes.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def synchronise(device: torch.device) -> None:
    """Wait until all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load(source: dict[str, Any], dtype: str, device: torch.device) -> PreTrainedModel:
    """The model of a `source`: {"pretrained": hub id or path}, or {"config": a config's fields with its model_type} for
    random weights, which are made on the device and the same wherever torch is."""
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
    """Random token ids (batch, length), the same in every process; of the lower half of the vocabulary, as image
    placeholders have high ids."""
    vocabulary = model.config.get_text_config().vocab_size // 2
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(model.device)


@torch.no_grad()
def read_prompt(model: PreTrainedModel, cache: Any, ids: torch.Tensor, clock: str) -> tuple[torch.Tensor, float]:
    """The first new token (batch, 1), and the milliseconds of the prefill."""
    now = CLOCKS[clock]
    synchronise(ids.device)
    start = now()
    token = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    synchronise(ids.device)
    return token, (now() - start) * 1e3


@torch.no_grad()
def decode(
    step: Callable[..., Any], cache: Any, token: torch.Tensor, length: int, steps: int, clock: str
) -> list[float]:
    """Milliseconds of each of `steps` decode steps behind `length` tokens. Every step ends synchronised: `generate`,
    too, looks at each token before it goes on. No token ends the answer."""
    now, times = CLOCKS[clock], []
    synchronise(token.device)
    start = now()
    for position in range(length, length + steps):
        positions = torch.full_like(token, position)
        token = step(token, position_ids=positions, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        synchronise(token.device)
        times.append(now())
    return [(after - before) * 1e3 for before, after in zip([start, *times], times, strict=False)]


def held_bytes(cache: Any) -> int:
    """Bytes allocated for keys and values by one of transformers' own caches."""
    return sum(states.untyped_storage().nbytes() for layer in cache.layers for states in (layer.keys, layer.values))
