"""Requests through transformers' continuous batching, with as much memory for keys and values, compressed or not."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from ..errors import KVCompressError
from ..hooks.model import text_decoder
from ..paged import compress


@dataclass(frozen=True)
class Served:
    """What came of the requests.

    Attributes:
        tokens: the answers, in the order of the requests.
        seconds: from the first request to the last answer, the manager's start not counted.
        cpu_seconds: the process's own time meanwhile.
        steps: forward passes.
        kv_bytes: of all pages.
    """

    tokens: list[list[int]]
    seconds: float
    cpu_seconds: float
    steps: int
    kv_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def page_bytes(model: PreTrainedModel, page_size: int) -> int:
    """Of `page_size` entries in all layers."""
    config = text_decoder(model).config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize * page_size


@torch.no_grad()
def serve(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: Sequence[int],
    kv_bytes: int,
    page_size: int = 16,
    batch_tokens: int = 1024,
    method: str | None = None,
    **arguments: object,
) -> Served:
    """Answer all prompts greedily, each with its number of new tokens.

    Args:
        kv_bytes: memory for the pages; rounded down to whole pages.
        batch_tokens: most tokens that pass through the model at once.
        method, arguments: as in `kvcompress.paged.compress`; without a method the cache is transformers' own.
    """
    each = page_bytes(model, page_size)
    pages = ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=kv_bytes // each,
        max_batch_tokens=batch_tokens,
        max_requests_per_batch=min(len(prompts), batch_tokens),
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=max(new_tokens))
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    handle = model.register_forward_hook(count)
    try:
        with (
            nullcontext() if method is None else compress(model, method, **arguments),
            model.continuous_batching_context_manager(greedy, continuous_batching_config=pages) as manager,
        ):
            start, cpu_start = time.perf_counter(), time.process_time()
            requests = list(zip(prompts, new_tokens, strict=True))
            names = [manager.add_request(list(prompt), max_new_tokens=new) for prompt, new in requests]
            answers = {}
            while len(answers) < len(names):
                answer = manager.get_result(timeout=1.0)
                if answer is None and not manager.is_running():
                    raise KVCompressError("transformers' continuous batching stopped before all requests were answered")
                if answer is not None and answer.error is not None:
                    raise KVCompressError(f"request {answer.request_id} failed: {answer.error}")
                if answer is not None:
                    answers[answer.request_id] = answer.generated_tokens
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    finally:
        handle.remove()
    return Served([answers[name] for name in names], seconds, cpu_seconds, steps, pages.num_blocks * each)
