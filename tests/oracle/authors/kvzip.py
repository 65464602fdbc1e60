"""snu-mllab/KVzip: its scores and threshold, of a context that is read again in chunks behind a system prompt of four
tokens. What is fed has the states of the first reading, on both sides."""

import ast
import sys
from pathlib import Path

import torch

from .recording import Recording
from .script import Recordings, prompts, run
from .states import ratio_of, states

SINKS = 4

DIFFERENCES = {}


def recordings(checkout: Path) -> Recordings:
    sys.path.insert(0, str(checkout / "attention"))
    from score import KVScore

    source = ast.parse((checkout / "model/wrapper.py").read_text())
    found = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "chunk_fn"]
    wrapper = {"torch": torch, "List": list}
    exec(compile(ast.Module(found, []), "wrapper.py", "exec"), wrapper)  # the rest of the file wants their CUDA code

    for name, prompt, budget in prompts():
        if budget >= prompt or budget <= SINKS + 1:
            continue  # they cut something, and never the system prompt
        for label, chunk, options in (("kvzip", 2000, {}), ("kvzip, chunks of 50", 50, {"chunk_size": 50})):
            kept = _kept(KVScore(), wrapper["chunk_fn"], states(name), prompt, budget - SINKS, chunk)
            yield Recording(label, "kvzip", options, name, prompt, budget, kept)
        # The ratio as they count it: of what stands behind the system prompt, which stays on top.
        behind = round(budget / prompt * (prompt - SINKS))
        options = {"variant": "code", "ratio": behind / (prompt - SINKS)}
        kept = _kept(KVScore(), wrapper["chunk_fn"], states(name), prompt, behind, 2000)
        of_table = ratio_of(name, prompt, budget)
        yield Recording("kvzip, variant=code", "kvzip", options, name, prompt, behind + SINKS, kept, ratio=of_table)


def _kept(cache, chunk_fn, given, prompt: int, behind: int, chunk: int) -> torch.Tensor:
    """What is kept where so many entries per head behind the system prompt are."""
    layers, heads = given.keys.shape[:2]
    cache.n_layers, cache.n_heads_kv, cache.dtype, cache.device = layers, heads, torch.float32, "cpu"
    cache.sink = cache.start_idx = SINKS
    cache.init_score()
    for ids in chunk_fn(torch.arange(SINKS, prompt)[None], chunk):
        cache.end_idx = cache.start_idx + ids.shape[1]
        for place in range(layers):
            _, keys, _ = given.layer(place, slice(0, prompt))
            fed, fed_keys, _ = given.layer(place, slice(cache.start_idx, cache.end_idx))
            cache._get_score(fed, torch.cat([keys, fed_keys], 2), place)
        cache.start_idx = cache.end_idx
    # They keep one less than the ratio says, the scores above that of the last.
    ratio = (behind * layers * heads + 1.5) / (layers * heads * (prompt - SINKS))
    valid, _ = cache._threshold(cache.score, ratio)
    return torch.cat([torch.ones(layers, heads, SINKS, dtype=torch.bool), valid[:, 0]], -1)


if __name__ == "__main__":
    functions = "attention/score.py: KVScore._get_score, _threshold; model/wrapper.py: chunk_fn, with scoring's indices"
    run(recordings, "snu-mllab/KVzip", functions)
