"""EffiVLM-Bench: what it runs under the names of other methods, `variant="effivlm"` here."""

from pathlib import Path
from types import SimpleNamespace

import torch

from .csp import softmax_n
from .recording import Recording, kept_columns
from .released import attention, definitions
from .script import Recordings, run
from .states import cases, states

FILE = "kv_cache_compression/kv_cache_utils.py"
CLUSTERS = {"streamingllm": "StreamingLLMKVCluster", "h2o": "H2OKVCluster", "snapkv": "SnapKVCluster"}
PYRAMID, LOOK_M, VL_CACHE, CSP = "pyramidkvCluster", "LOOK_MCluster", "VlCacheKVCluster", "CSPCluster"
STATES = ("random_gqa", "smollm2", "tiny")

ROUNDED = "each layer's step is rounded down there, so that the layers hold more together"
OF_LAYERS = "each layer's part is rounded down there; at least a hundredth is kept of each"
TWICE = "what both rankings choose is stored twice there"
FP32 = "their sums and what they take off those of images are in fp32"
DIFFERENCES = {
    "pyramidkv, effivlm/": (0.83, ROUNDED),
    **{f"pyramidkv, effivlm/{name}": (0.96, ROUNDED) for name in ("random_gqa/300", "smollm2/464", "tiny/378")},
    "vl-cache, effivlm/": (0.92, OF_LAYERS),
    **{
        f"vl-cache, effivlm/{name}": (0.78, "what a full layer cannot take is lost there")
        for name in ("random_gqa/100+0/120", "smollm2/464+0/232", "smollm2/154+0/174", "tiny/126+0/146")
    },
    "csp/": (0.8, TWICE),
    "look-m, effivlm/tiny/378+0/189": (0.999, FP32),
}


def recordings(checkout: Path) -> Recordings:
    names = ("repeat_kv", "merge_kv", *CLUSTERS.values(), PYRAMID, LOOK_M, VL_CACHE, CSP)

    def released(**constants: int) -> dict:
        found = {int(name.removeprefix("of_")): value for name, value in constants.items()}
        return definitions(checkout / FILE, *names, constants=found, softmax_n=softmax_n)

    def of_layers(name: str, prompt: int, keep) -> torch.Tensor:
        """What `keep(place, queries, keys, values)` keeps, by its keys."""
        given, kept = states(name), []
        for place in range(given.layers):
            queries, keys, values = given.layer(place, slice(0, prompt))
            kept.append(kept_columns(keep(place, queries, keys, values)[0], keys[0]))
        return torch.stack(kept)

    def record(
        label: str, method: str, name: str, prompt: int, budget: int, kept: torch.Tensor, **options
    ) -> Recording:
        return Recording(label, method, options, name, prompt, budget, kept)

    theirs = released()
    for name in STATES:
        given = states(name)
        for prompt, budget in cases(name):
            ratio = (budget + 0.5) / prompt  # they round down
            for method, class_name in CLUSTERS.items():
                cluster = theirs[class_name](prompt, ratio)

                def one(place, queries, keys, values, cluster=cluster, given=given):
                    return cluster.update_kv(keys, queries, values, None, given.groups)[0]

                kept = of_layers(name, prompt, one)
                yield record(f"{method}, effivlm", method, name, prompt, budget, kept, variant="effivlm")

            def pyramid(place, queries, keys, values, ratio=ratio, given=given):
                cluster = theirs[PYRAMID](keys.shape[2], ratio, num_hidden_layers=given.layers, layer_idx=place)
                return cluster.update_kv(keys, queries, values, None, given.groups)[0]

            if budget < prompt:
                options = {"variant": "effivlm", "layer_budget": "pyramid-effivlm"}
                kept = of_layers(name, prompt, pyramid)
                yield record("pyramidkv, effivlm", "pyramidkv", name, prompt, budget, kept, **options)
            kept = vl_cache(theirs, name, prompt, ratio)
            options = {"variant": "effivlm", "layer_budget": "sparsity-effivlm", "head_budget": "shared"}
            yield record("vl-cache, effivlm", "vl-cache", name, prompt, budget, kept, **options)
    for name in ("random_gqa", "tiny", "smollm2_image"):
        given = states(name)
        vision = torch.zeros(given.prompt, dtype=torch.bool)
        vision[slice(*given.vision)] = True
        for prompt, budget in cases(name):
            recent = max(1, int(0.1 * budget))
            ratios = {"hh_ratio": (budget - recent + 0.5) / prompt, "recent_ratio": (recent + 0.5) / prompt}

            # What they take off the scores of images, so that fp32 still tells those apart.
            def look_m(place, queries, keys, values, ratios=ratios, given=given, vision=vision):
                cluster = released(of_128=keys.shape[3], of_10000=512)[LOOK_M](**ratios, merge=False)
                text = [(~vision[: keys.shape[2]]).tolist()]
                rest = (None, given.groups, text, keys.shape[3], None, False, keys, values)
                return cluster.update_kv(None, queries, None, *rest)[0]

            kept = of_layers(name, prompt, look_m)
            yield record("look-m, effivlm", "look-m", name, prompt, budget, kept, variant="effivlm", merge="none")

            def csp(place, queries, keys, values, budget=budget, vision=vision):
                halves = {"hh_ratio": budget - budget // 2, "recent_ratio": budget // 2}
                ratios = {half: (size + 0.5) / keys.shape[2] for half, size in halves.items()}
                of_image = vision[: keys.shape[2]]
                cluster = theirs[CSP](of_image, **ratios, cross_ratio=0.5, csp_head_adaptive=True)
                return cluster.update_kv(keys, values, queries, attention(queries, keys, softmax=False), None)[0]

            yield record("csp", "csp", name, prompt, budget, of_layers(name, prompt, csp))


def vl_cache(theirs: dict, name: str, prompt: int, ratio: float) -> torch.Tensor:
    """The question is what is behind the image; as in their model's code, where there is none the last 32 tokens."""
    given = states(name)
    cluster = theirs[VL_CACHE](ratio, False, False, True)
    behind = prompt - given.vision[1] if 0 < given.vision[1] < prompt else min(32, prompt)
    sparsity, importance = [], []
    for place in range(given.layers):
        weights = attention(*given.layer(place, slice(0, prompt))[:2])[:, :, -behind:]
        sparsity.append(cluster.get_sparsity_layer(weights, prompt, behind))
        importance.append(cluster.get_token_importance(weights))
    columns = [torch.arange(prompt).view(1, 1, -1, 1).expand(1, 1, -1, -1) for _ in range(given.layers)]
    cache = Held(key_cache=list(columns), value_cache=list(columns))
    budgets, order = cluster.get_budget_layer_and_sorted_attn_kv_indices(sparsity, importance, given.layers, cache)
    kept = torch.zeros(given.layers, given.keys.shape[1], prompt, dtype=torch.bool)
    for place in range(given.layers):
        cluster.allocate_budget_and_update_kv(budgets, order, place, cache)
        kept[place, :, cache.key_cache[place].flatten()] = True
    return kept


class Held(SimpleNamespace):
    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key_cache[place], self.value_cache[place]


if __name__ == "__main__":
    every = ", ".join((*CLUSTERS.values(), PYRAMID, LOOK_M, VL_CACHE, CSP))
    run(recordings, "EffiVLM-Bench/EffiVLM-Bench", f"{FILE}: {every}")
