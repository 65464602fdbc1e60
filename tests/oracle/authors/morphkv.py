"""ghadiaravi13/MorphKV, its eager attention and its cache, fed the prompt's last queries as its flash attention leaves
them. It evicts while it attends to a token, by the queries before it, so that a step more is fed than is counted."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording, kept_columns
from .released import definitions, repeat_kv
from .script import Recordings, prompts, run
from .states import DECODED, NAMES, states

WINDOW = 8

OWN_COLUMNS = "its attention of query heads that share a KV head is cut by each one's own choice, not by the keys'"
DIFFERENCES = {
    f"morphkv, window_size={WINDOW}, fusion={fusion}/{name}/{length}+{DECODED}": (0.64, OWN_COLUMNS)
    for fusion in ("max", "sum")
    for name in NAMES
    for length in (states(name).prompt, states(name).prompt // 3)
    if states(name).groups > 1
}


def recordings(checkout: Path) -> Recordings:
    caches = definitions(checkout / "morphkv/morph_cache.py", "DynamicCache", Cache=object)
    stand_ins = {"apply_rotary_pos_emb": lambda queries, keys, cos, sin: (queries, keys), "repeat_kv": repeat_kv}
    attend = definitions(checkout / "morphkv/models/patch_llama.py", "LlamaAttentionMorph", **stand_ins)
    theirs = attend["LlamaAttentionMorph"]

    class Cache(caches["DynamicCache"]):
        def __init__(self, layers: int):  # its base is transformers'
            self.key_cache, self.value_cache, self.attn_cache = ([[] for _ in range(layers)] for _ in range(3))
            self.cleaned, self.prefill, self.input_size, self._seen_tokens = [False] * layers, False, torch.inf, 0
            self.cache_size = {"key": 0, "value": 0, "attn_wts": 0, "len": 0}

    def keep(name: str, place: int, prompt: int, decoded: int, budget: int, fusion: str) -> torch.Tensor:
        given, cache = states(name), Cache(1)
        queries, keys, values = given.layer(place, slice(0, prompt))
        heads, head_dim = queries.shape[1], keys.shape[3]
        cache.update(keys, values, 0)
        logits = queries[:, :, -WINDOW:] @ keys.repeat_interleave(given.groups, 1).mT / head_dim**0.5
        empty = torch.full((*logits.shape[:3], 1), -torch.inf)
        cache.attn_cache[0] = torch.cat([logits, empty], -1)
        layer = SimpleNamespace(
            config=SimpleNamespace(pretraining_tp=1, morphkv={"evict_after": 1.0}),
            num_heads=heads,
            num_key_value_heads=heads // given.groups,
            num_key_value_groups=given.groups,
            head_dim=head_dim,
            layer_idx=0,
            morph_type=f"{fusion}_fused",
            WIN_SIZE=WINDOW,
            MAX_CAPACITY=budget,
            evict_after=1.0,
            garbage=[False],
            attention_dropout=0.0,
            training=False,
            o_proj=torch.nn.Identity(),
        )
        layer.morphkv_mask = partial(theirs.morphkv_mask, layer)
        for step in range(prompt, prompt + decoded + 1):
            step = min(step, keys_of(name) - 1)  # the one more says nothing
            for projection, part in zip("qkv", given.layer(place, slice(step, step + 1)), strict=True):
                setattr(layer, f"{projection}_proj", lambda _, part=part: part.transpose(1, 2).flatten(2))
            theirs.forward(layer, torch.empty(1, 1, 1), past_key_value=cache, position_embeddings=(0, 0))
        stays = cache.key_cache[0][0, :, :-1]
        return kept_columns(stays, given.keys[place, :, : prompt + decoded])

    def keys_of(name: str) -> int:
        return states(name).keys.shape[2]

    for name, prompt, budget in prompts():
        for decoded in (0, DECODED):
            for fusion in ("max", "sum"):
                if budget <= WINDOW or budget >= prompt:
                    continue
                layers = range(states(name).layers)
                kept = torch.stack([keep(name, place, prompt, decoded, budget, fusion) for place in layers])
                options = {"window_size": WINDOW, "fusion": fusion}
                options |= {"decode_budget": budget} if decoded else {}
                label = f"morphkv, window_size={WINDOW}, fusion={fusion}"
                yield Recording(label, "morphkv", options, name, prompt, budget, kept, decoded)


if __name__ == "__main__":
    functions = "morphkv/models/patch_llama.py: LlamaAttentionMorph; morphkv/morph_cache.py: DynamicCache"
    run(recordings, "ghadiaravi13/MorphKV", functions)
