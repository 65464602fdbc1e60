"""AIoT-MLSys-Lab/MEDA: layers by the entropy of their attention, text first, averaged merging, of one image.

Its cache is compressed when the first token was decoded, with that token's attention and among its entries: as a prompt
that is one token longer. The entropy is that of the prompt before.
"""

from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording
from .released import attention, branch, definitions, of_kv_heads
from .script import Recordings, prompts, run
from .states import NAMES, WITH_IMAGE, ratio_of, states

FOLDER = "Dynamic-MLLMs/LLaVA-mix_merge_v1/llava/model/kv_token_merge/"
FILE, LAYERS = FOLDER + "modify_llama.py", FOLDER + "v433_modeling_dynamic_llama.py"
CACHE, ATTENTION = "AttnEntropyTextAVGMergeKVCache_LayerWise", "DynamicLlamaAttention_drop"

ROUNDED = "each layer's two halves are rounded down there"
CAPPED = "what a full layer cannot take is lost there; here the others get it"
DIFFERENCES = {
    "meda/": (0.9, ROUNDED),
    **{f"meda/{state}/301+0/60": (0.98, ROUNDED) for state in ("random_gqa_image", "random_mha_image")},
    "meda/smollm2_image/465+0/93": (0.98, ROUNDED),
    "meda/smollm2_image/465+0/232": (0.8, CAPPED),
    **{f"meda/{name}": (0.75, CAPPED) for name in ("smollm2_image/155+0/174", "tiny/127+0/146")},
    **{f"meda/random_{heads}_image/101+0/120": (0.8, CAPPED) for heads in ("gqa", "mha")},
}


def recordings(checkout: Path) -> Recordings:
    entropy = definitions(checkout / FILE, ATTENTION)[ATTENTION].compute_multimodal_entropy

    def by_entropy(name: str, prompt: int, budget: int) -> list[tuple[float, float]]:
        """What part of the prompt each layer keeps as heavy hitters, and as recent tokens."""
        given, layers, half = states(name), [], budget / prompt / 2
        for place in range(given.layers):
            queries, keys, _ = given.layer(place, slice(0, prompt))
            layers.append(SimpleNamespace(self_attn=SimpleNamespace(uniform_hh_ratio=half, uniform_recent_ratio=half)))
            entropy(layers[-1].self_attn, prompt, attention(queries, keys))
        model = SimpleNamespace(layers=layers, config=SimpleNamespace(num_hidden_layers=len(layers)))
        branch(checkout / LAYERS, "self.layers[0].self_attn.multimodal_entropy != 0", self=model)
        return [(layer.self_attn.layer_hh_ratio, layer.self_attn.layer_recent_ratio) for layer in layers]

    def keep(name: str, tokens: int, ratios: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """What is kept, the states of it, and whether that is more than the ratios say."""
        given, kept, stored, exceeds = states(name), [], [], False
        first, end = given.vision[0], min(given.vision[1], tokens)
        in_llava = {576: end - first, 575: end - first - 1, 128: given.keys.shape[3]}
        theirs = definitions(checkout / FILE, CACHE, constants=in_llava)[CACHE]
        for place, of_layer in enumerate(ratios):
            queries, keys, values = given.layer(place, slice(0, tokens))
            cache = theirs(hh_ratio=0.1, recent_ratio=0.1)
            cache.image_position = torch.tensor([first])
            scores = of_kv_heads(attention(queries, keys), given)[0].sum(1)
            stays = cache((keys.double(), values.double()), scores, *of_layer)
            kept.append(
                torch.ones_like(scores, dtype=torch.bool) if cache.cache_size >= tokens else cache.hh_score >= 0
            )
            stored.append(torch.cat(stays).float())
            exceeds |= int(kept[-1][0].sum()) > cache.cache_size
        return torch.stack(kept), stored, exceeds

    for name, prompt, budget in prompts((*WITH_IMAGE, *(name for name in NAMES if states(name).vision[1]))):
        try:
            kept, _, exceeds = keep(name, prompt + 1, by_entropy(name, prompt, budget))
        except RuntimeError:
            continue  # 100 tokens more than all text do not leave as many others as heavy hitters are asked for
        if not exceeds:
            ratio = ratio_of(name, prompt, budget)
            yield Recording("meda", "meda", {}, name, prompt + 1, budget, kept, ratio=ratio)
    for name, prompt, budget in (("tiny", 378, 40), ("random_mha", 300, 60)):
        text = prompt - states(name).vision[1] + states(name).vision[0]
        kept, _, exceeds = keep(name, prompt, evenly(states(name).layers, budget, prompt))
        size = int(kept[0][0].sum())
        assert exceeds
        options = {"layer_budget": "uniform", "recent": (text + 100.5) / size}
        yield Recording("meda, text and 100 recent tokens", "meda", options, name, prompt, size, kept)
    kept, stored, _ = keep("random_gqa_image", 100, evenly(4, 10, 100))
    keys, values = torch.stack(stored).unbind(1)
    options = {"layer_budget": "uniform"}
    label = "meda, averaged merging"
    yield Recording(label, "meda", options, "random_gqa_image", 100, 10, kept, keys=keys, values=values)


def evenly(layers: int, budget: int, tokens: int) -> list[tuple[float, float]]:
    return [((budget - budget // 2 + 0.5) / tokens, (budget // 2 + 0.5) / tokens)] * layers


if __name__ == "__main__":
    functions = f"{FILE}: {CACHE}, {ATTENTION}.compute_multimodal_entropy; {LAYERS}: the layers' ratios"
    run(recordings, "AIoT-MLSys-Lab/MEDA", functions)
