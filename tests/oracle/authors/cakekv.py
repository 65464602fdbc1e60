"""antgroup/cakekv (CAKE), window 32, gamma 200, both temperatures 1 and without cascading, as pred_cake.py for a model
that has no temperatures. A prompt no longer than the budget and the window together is not cut before the first decoded
token. Budgets within the window fail in it."""

from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording, kept_columns
from .released import definitions, repeat_kv
from .script import Recordings, prompts, run
from .states import DECODED, NAMES, states

TAUS = {"window_size": 8, "tau1": 1.6, "tau2": 0.4}
ATTEND = "llama_attn_forward_cake"
UNPOOLED = {"window_size": 32, "kernel_size": 1}

ORDER = "its entries lie by score, the window last, and while decoding it pools neighbours there; ours are in order"
DIFFERENCES = {
    f"cake/{name}/{length}+{DECODED}": (0.7, ORDER)
    for name in NAMES
    for length in (states(name).prompt, states(name).prompt // 3)
}


def recordings(checkout: Path) -> Recordings:

    def part(file: str, *names: str, **given: object) -> dict[str, object]:
        found = definitions(checkout / "cake" / file, *names, **given)
        return {name: found[name] for name in names}

    utils = part("utils.py", "calculate_entropy", "adjust_budgets")

    def released(pooled: bool) -> dict[str, object]:
        """Its functions; where not `pooled`, with a pooling that does nothing, so that no order matters."""
        functional = torch.nn.functional if pooled else SimpleNamespace(avg_pool1d=lambda scores, **kwargs: scores)
        names = ("CakeCache", "CakeprefillKVCache", "CakeDecodingKVCache_LayerWise")
        caches = part("cake_cache.py", *names, F=functional, Cache=object, **utils)
        stand_ins = {
            "StaticCache": (),
            "DynamicCache": (),
            "apply_rotary_pos_emb": lambda queries, keys, cos, sin: (queries, keys),
            "repeat_kv": repeat_kv,
            "logger": SimpleNamespace(warning_once=lambda message: None),
            "_flash_attention_forward": lambda queries, *args, **kwargs: queries,
        }
        attend = part("model/modify_llama.py", ATTEND, F=functional, **stand_ins, **utils, **caches)
        return {**caches, **attend}

    def recording(label: str, name: str, prompt: int, decoded: int, budget: int, options: dict) -> Recording:
        given, window = states(name), options.get("window_size", 32)
        theirs = released(options.get("kernel_size") != 1)
        heads, layers = given.queries.shape[1], given.layers
        evict = theirs["CakeprefillKVCache"](budget, window, num_heads=heads, num_layers=layers)
        config = SimpleNamespace(
            key_size=[budget - window] * layers, window_size=[window] * layers, prefill=[True] * layers,
            decoding_evict=[None] * layers, prefill_cake_evict=[evict] * layers, tau1=options.get("tau1", 1.0),
            tau2=options.get("tau2", 1.0), gamma=200.0,
        )  # fmt: skip
        cache = theirs["CakeCache"]()

        def feed(tokens: slice) -> None:
            hidden = torch.empty(1, tokens.stop - tokens.start, 1)
            for place in range(layers):
                projections = [torch.nn.Identity() for _ in range(3)]
                for projection, part in zip(projections, given.layer(place, tokens), strict=True):
                    projection.weight = torch.empty(0)
                    projection.forward = lambda _, states=part: states.transpose(1, 2).flatten(2)
                layer = SimpleNamespace(
                    q_proj=projections[0], k_proj=projections[1], v_proj=projections[2], o_proj=torch.nn.Identity(),
                    config=config, layer_idx=place, num_heads=heads, num_key_value_heads=heads // given.groups,
                    num_key_value_groups=given.groups, head_dim=given.keys.shape[3], attention_dropout=0.0,
                    training=False, is_causal=True, _flash_attn_uses_top_left_mask=False,
                )  # fmt: skip
                theirs[ATTEND](layer, hidden, past_key_value=cache, position_embeddings=(0, 0))

        feed(slice(0, prompt))
        for step in range(prompt, prompt + decoded):
            feed(slice(step, step + 1))
        among = given.keys[:, :, : prompt + decoded]
        kept = torch.stack([kept_columns(cache.key_cache[place][0], among[place]) for place in range(layers)])
        options = {**options, "decode_budget": budget} if decoded else options
        return Recording(label, "cake", options, name, prompt, budget, kept, decoded)

    for name, prompt, budget in prompts():
        if prompt > budget + 8 > 16:
            label = "cake, window_size=8, tau1=1.6, tau2=0.4"
            yield recording(label, name, prompt, 0, budget, TAUS)
        if prompt > budget + 32 > 64:
            yield recording("cake", name, prompt, 0, budget, {})
        if budget > 32:
            yield recording("cake", name, prompt, DECODED, budget, {})
            yield recording("cake, kernel_size=1", name, prompt, DECODED, budget, UNPOOLED)


if __name__ == "__main__":
    functions = "cake/model/modify_llama.py: llama_attn_forward_cake; cake/cake_cache.py; cake/utils.py"
    run(recordings, "antgroup/cakekv", functions)
