"""mit-han-lab/streaming-llm: its cache, and its keys at their place in the cache."""

import sys
from pathlib import Path

import torch

from .recording import Recording, kept_columns
from .script import Recordings, prompts, run
from .states import DECODED, States, states
from .stepping import behind

SINKS = 4
MOVED = (("random_gqa", 100, 20), ("random_mha", 100, 10))  # angles of recorded states are rounded

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    sys.path[:0] = [str(checkout / "streaming_llm"), str(checkout / "streaming_llm/pos_shift")]
    import modify_llama
    from kv_cache import StartRecentKVCache

    for name, prompt, budget in prompts():
        for decoded in (0, DECODED):
            kept, _ = _kept(StartRecentKVCache, states(name), prompt, decoded, budget)
            options = {"decode_budget": budget, "decode_interval": 1} if decoded else {}
            yield Recording("streamingllm", "streamingllm", options, name, prompt, budget, kept, decoded)
    for name, prompt, budget in MOVED:
        for decoded in (0, 20):
            given = states(name)
            kept, held = _kept(StartRecentKVCache, given, prompt, decoded, budget)
            # They rotate each key to its index. Attention knows differences alone: both are moved by what was evicted,
            # so that the last token stands where it truly is.
            evicted = prompt + decoded - budget
            places = torch.arange(evicted, prompt + decoded)[None]
            keys = modify_llama.apply_rotary_pos_emb_single(held, given.cos[None, None], given.sin[None, None], places)
            options = {"positions": "cache"}
            options |= {"decode_budget": budget, "decode_interval": 1} if decoded else {}
            label = "streamingllm, positions=cache"
            yield Recording(label, "streamingllm", options, name, prompt, budget, kept, decoded, keys=keys)


def _kept(
    cache_class: type, given: States, prompt: int, decoded: int, budget: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept columns, and the keys before their rotation, as their attention stores them."""
    tokens = prompt + decoded
    flat = given.keys[:, :, :tokens]
    unrotated = given.rotary(slice(0, tokens)).unrotated(flat)
    cache, past = cache_class(SINKS, budget - SINKS), None
    for start, stop in [(0, prompt), *((t, t + 1) for t in range(prompt, tokens))]:
        new = unrotated[:, :, start:stop]
        past = behind(past, new, new)
        past = cache([past])[0]
    return torch.stack([kept_columns(k, a) for k, a in zip(past[0], unrotated, strict=True)]), past[0]


if __name__ == "__main__":
    functions = "kv_cache.py: StartRecentKVCache; pos_shift/modify_llama.py: apply_rotary_pos_emb_single"
    run(recordings, "mit-han-lab/streaming-llm", functions)
