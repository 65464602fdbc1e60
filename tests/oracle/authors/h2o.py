"""FMInference/H2O: the cache of its real eviction. It knows no grouped queries: KV heads have the mean weights of
theirs."""

import ast
from pathlib import Path

import torch

from .recording import Recording, kept_columns
from .script import Recordings, prompts, run
from .states import DECODED, States, states
from .stepping import attention, behind, grouped, passes

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    path = checkout / "h2o_hf/utils_real_drop/modify_llama.py"
    found = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "H2OKVCache_LayerWise"]
    theirs = {"torch": torch}
    exec(compile(ast.Module(found, []), str(path), "exec"), theirs)  # the rest of the file is for an old transformers

    for name, prompt, budget in prompts():
        for decoded in (0, DECODED):
            kept = _kept(theirs["H2OKVCache_LayerWise"], states(name), prompt, decoded, budget)
            options = {"decode_budget": budget} if decoded else {}
            yield Recording("h2o", "h2o", options, name, prompt, budget, kept, decoded)


def _kept(cache_class: type, given: States, prompt: int, decoded: int, budget: int) -> torch.Tensor:
    kept, kv_heads = [], given.keys.shape[1]
    for place in range(given.layers):
        past, cache = None, cache_class(budget - budget // 2, budget // 2)
        for queries, keys, values in passes(given, place, prompt, decoded):
            past = behind(past, keys, values)
            past = cache(past, grouped(attention(queries, past[0]), kv_heads))
        kept.append(kept_columns(past[0][0], given.keys[place, :, : prompt + decoded]))
    return torch.stack(kept)


if __name__ == "__main__":
    functions = "h2o_hf/utils_real_drop/modify_llama.py: H2OKVCache_LayerWise"
    run(recordings, "FMInference/H2O", functions)
