"""TerryPei/CSP: ranked within and across modalities, of one image in the prompt. It knows no grouped queries."""

from pathlib import Path

import torch

from .recording import Recording, kept_columns
from .released import attention, definitions
from .script import Recordings, run
from .states import cases, states

FILE = "LLaVA-mix_merge_v1/llava/model/kv_token_merge/modify_llama.py"
CLASS = "New_LayerWise"
MILEBENCH = {"DocVQA": (0.1, 1.0), "WebQA": (0.9, 1.0), "SlideVQA": (0.5, 0.5), "EgocentricNavigation": (0.5, 1.5)}

TWICE = "what both rankings choose is stored twice there, and takes the room of another entry"
DIFFERENCES = {"csp/": (0.8, TWICE), "csp, presets": (0.83, TWICE)}


def softmax_n(logits: torch.Tensor, n: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """In place of the flash_attention_softmax_n package."""
    weights = logits.exp()
    return weights / (n + weights.sum(dim, keepdim=True))


def recordings(checkout: Path) -> Recordings:

    def recording(label: str, name: str, prompt: int, budget: int, ratio: float, bias: float, **options) -> Recording:
        given, kept, recent = states(name), [], budget // 2
        first, end = given.vision[0], min(given.vision[1], prompt)
        in_llava = {576: end - first, 575: end - first - 1}
        names = (CLASS, "apply_selection_function")
        theirs = definitions(checkout / FILE, *names, constants=in_llava, softmax_n=softmax_n)[CLASS]
        for place in range(given.layers):
            queries, keys, values = given.layer(place, slice(0, prompt))
            ratios = {"hh_ratio": (budget - recent + 0.5) / prompt, "recent_ratio": (recent + 0.5) / prompt}
            cache = theirs(**ratios, cross_ratio=ratio, kv_recent_bias=bias)
            cache.image_position = torch.tensor([first])
            stays, _ = cache((keys, values), queries, attention(queries, keys, softmax=False), None, 0)
            kept.append(kept_columns(stays[0], keys[0]))
        return Recording(label, "csp", options, name, prompt, budget, torch.stack(kept))

    for name in ("random_mha_image", "random_mha"):
        for prompt, budget in cases(name):
            yield recording("csp", name, prompt, budget, 0.5, 1.0)
            yield recording("csp, across only", name, prompt, budget, 1.0, 1.0, cross=1.0)
        for dataset, (ratio, bias) in MILEBENCH.items():
            for budget in (60, 30):
                yield recording("csp, presets", name, 300, budget, ratio, bias, preset=dataset.lower())


if __name__ == "__main__":
    run(recordings, "TerryPei/CSP", f"{FILE}: {CLASS}")
