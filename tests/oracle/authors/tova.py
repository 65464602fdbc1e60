"""schwartz-lab-NLP/TOVA: its cache."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording, kept_columns
from .script import Recordings, prompts, run
from .states import DECODED, States, states
from .stepping import attention, behind, passes

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    sys.path.insert(0, str(checkout / "src"))
    from tova_cache import TOVACache

    for name, prompt, budget in prompts():
        for decoded in (0, DECODED):
            kept = _kept(TOVACache, states(name), prompt, decoded, budget)
            options = {"decode_budget": budget} if decoded else {}
            yield Recording("tova", "tova", options, name, prompt, budget, kept, decoded)


def _kept(cache_class: type, given: States, prompt: int, decoded: int, budget: int) -> torch.Tensor:
    kept = []
    for place in range(given.layers):
        past, cache = None, SimpleNamespace(cache_size=budget)
        for queries, keys, values in passes(given, place, prompt, decoded):
            past = behind(past, keys, values)
            cache.key_cache, cache.value_cache = ([states] for states in past)
            cache_class.reduce(cache, 0, attention(queries, past[0]))
            past = cache.key_cache[0], cache.value_cache[0]
        kept.append(kept_columns(past[0][0], given.keys[place, :, : prompt + decoded]))
    return torch.stack(kept)


if __name__ == "__main__":
    run(recordings, "schwartz-lab-NLP/TOVA", "src/tova_cache.py: TOVACache.reduce")
