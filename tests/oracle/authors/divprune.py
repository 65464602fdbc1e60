"""vbdi/divprune: DivPrune, which chooses among the image's projected tokens."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from .token_recording import Prompt, Recordings, TokenRecording, chosen, released, run

ours = chosen


def recordings(checkout: Path) -> Recordings:
    file, names = checkout / "LLaVA/llava/model/llava_arch.py", {"torch": torch}
    likeness, choose = (
        released(file, f"LlavaMetaForCausalLM.{name}", names) for name in ("pairwise_cosine_similarity", "DivPrune")
    )
    for seed, (images, ratio) in enumerate([(576, 0.098), (576, 0.3), (90, 0.9)]):
        drawn = {"seed": 10 * seed, "layers": 0, "before": 5, "images": images, "behind": 7}
        prompt = Prompt.draw(**drawn)
        tokens = prompt.hidden[prompt.vision]
        model = SimpleNamespace(pairwise_cosine_similarity=partial(likeness, None))
        places, _ = choose(model, tokens, images, threshold_ratio=ratio)
        yield TokenRecording("divprune", "divprune", {}, drawn, len(places), [tokens[places]])


if __name__ == "__main__":
    functions = "LLaVA/llava/model/llava_arch.py: LlavaMetaForCausalLM.DivPrune, pairwise_cosine_similarity"
    run(recordings, "vbdi/divprune", functions)
