"""Janghyun1230/FastKVzip with gates that are drawn: what prefill/ evicts of a prompt whose first four tokens are the
system's, and what math/ evicts of a prompt and at each of 64 decode steps, with a window of one token."""

from pathlib import Path
from types import SimpleNamespace

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .recording import Recording, kept_columns
from .released import definitions
from .script import Recordings, prompts, run
from .states import DECODED, NAMES, States, gates, hidden, states

SINKS = 4

LABEL, DECODING = "fastkvzip", "fastkvzip, window_ratio=0"
WINDOW = "its window is a part of what follows the system prompt, without its first tokens"
SHARES = "while decoding layers share the budget as they did in the prompt; there all compete anew"
DIFFERENCES = {
    **{f"{LABEL}/{name}/": (0.9, WINDOW) for name in ("random_gqa", "random_mha")},
    **{
        f"{DECODING}/{name}/{length}+{DECODED}": (0.88, SHARES)
        for name in NAMES
        for length in (states(name).prompt, states(name).prompt // 3)
    },
}


class Cache:
    """In place of transformers' DynamicCache of their version."""

    def __init__(self):
        self.key_cache, self.value_cache, self._seen_tokens = [], [], 0


def appended(old: torch.Tensor, new: torch.Tensor, lengths: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """In place of their CUDA kernel: each head's new states behind its old ones."""
    parts = zip(ends.tolist(), lengths.tolist(), new.chunk(len(lengths)), strict=False)
    return torch.cat([torch.cat([old[first : first + count], more]) for first, count, more in parts])


def recordings(checkout: Path) -> Recordings:
    in_prompt, while_decoding = checkout / "prefill", checkout / "math/method"
    module = definitions(in_prompt / "attention/gate.py", "Weight", Qwen3RMSNorm=Qwen3RMSNorm)["Weight"]
    score = definitions(in_prompt / "attention/score.py", "KVScore")["KVScore"]
    evict = definitions(in_prompt / "attention/kvcache.py", "EvictCache", DynamicCache=Cache, KVScore=score)[
        "EvictCache"
    ]
    wrapper = definitions(in_prompt / "model/wrapper.py", "ModelKVzip", "chunk_fn", tqdm=lambda chunks, desc: chunks)
    compressor = definitions(while_decoding / "compression/fastkvzip.py", "FastKVzip")["FastKVzip"]
    later = definitions(
        while_decoding / "kvcache.py",
        "EvictCache",
        DynamicCache=Cache,
        KV_COMPRESSION_MAP={"fastkvzip": compressor},
        update_flatten_view=appended,
    )["EvictCache"]

    def modules(given: States) -> list[torch.nn.Module]:
        found = []
        for place, weights in enumerate(gates(given)):
            heads, _, sinks, size = weights["k_base"].shape
            inputs = weights["k_proj.weight"].shape[1]
            found.append(module(place, inputs, size, heads, given.groups, torch.float32, sinks).requires_grad_(False))
            found[-1].load_state_dict(weights)
        return found

    def model_of(given: States) -> SimpleNamespace:
        sizes = {"num_attention_heads": given.queries.shape[1], "num_key_value_heads": given.keys.shape[1]}
        config = SimpleNamespace(num_hidden_layers=given.layers, **sizes)
        return SimpleNamespace(config=config, parameters=lambda: iter([given.keys]))

    def of_prompt(name: str, prompt: int, budget: int) -> torch.Tensor:
        given = states(name)
        layers, heads = given.keys.shape[:2]

        def read(ids: torch.Tensor, kv: object, update_cache: bool) -> None:
            for place, (gate, tokens) in enumerate(zip(kv.gates, [slice(0, prompt)] * layers, strict=True)):
                kv._update_score(place, gate(hidden(given, place, tokens)))
                kv.update(*given.layer(place, tokens)[1:], place)

        cache = evict(model_of(given), (SINKS, prompt))
        model = SimpleNamespace(sys_prompt_ids=torch.zeros(1, SINKS), gates=modules(given), kv_type="evict")
        model._init_kv, model.__call__ = (lambda evict_range: cache), read
        wrapper["ModelKVzip"].prefill(model, torch.zeros(1, prompt - SINKS), do_score=True)
        entries = layers * heads * (budget - SINKS)
        cache.prune((entries + 1.5) / (layers * heads * (prompt - SINKS)))  # it keeps what is above the entry after
        return _kept(cache, given, prompt)

    def decoded(name: str, prompt: int, steps: int, budget: int) -> torch.Tensor:
        given = states(name)
        asked = {"budget": budget, "window_size": 1, "first_tokens": SINKS, "gate": modules(given), "device": "cpu"}
        cache = later(model_of(given), {"method": "fastkvzip", "compression": True, "method_config": asked})
        for tokens in (slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, prompt + steps))):
            for place in range(given.layers):
                cache.compressor._update_hidden_cache(hidden(given, place, tokens), place)
                cache.compressor._update_score(place)
                cache.update(*given.layer(place, tokens)[1:], place)
            cache.compress_post()
        return _kept(cache, given, prompt + steps)

    for name, prompt, budget in prompts():
        if not SINKS + 0.02 * prompt < budget < prompt:
            continue
        kept = of_prompt(name, prompt, budget)
        yield Recording(LABEL, "fastkvzip", {}, name, prompt, budget, kept)
        for steps in (0, DECODED):
            kept, options = decoded(name, prompt, steps, budget), {"window_ratio": 0.0}
            options |= {"decode_budget": budget, "decode_interval": 1} if steps else {}
            yield Recording(DECODING, "fastkvzip", options, name, prompt, budget, kept, steps)


def _kept(cache: Cache, given: States, tokens: int) -> torch.Tensor:
    of_layers = []
    for place, entries in enumerate(cache.key_cache):
        of_heads = entries.split(cache.info["len_k"][place].tolist())
        among = given.keys[place, :, :tokens]
        of_layers.append(torch.cat([kept_columns(e[None], k[None]) for e, k in zip(of_heads, among, strict=True)]))
    return torch.stack(of_layers)


if __name__ == "__main__":
    functions = "prefill/: Weight, KVScore, EvictCache, ModelKVzip.prefill; math/method/: FastKVzip, EvictCache"
    run(recordings, "Janghyun1230/FastKVzip", functions)
