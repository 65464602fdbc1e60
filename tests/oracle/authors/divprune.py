"""vbdi/divprune: DivPrune, which chooses among the image's projected tokens."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from kvcompress.methods import make_method

from .token_recording import Prompt, TokenRecording, chosen_of, released, save


def ours(recording: TokenRecording) -> list[torch.Tensor]:
    method = make_method(recording.method, **recording.options)
    return [chosen_of(Prompt.draw(**recording.drawn), method, recording.budget)]


def main() -> None:
    checkout = Path(sys.argv[1])
    file, names = checkout / "LLaVA/llava/model/llava_arch.py", {"torch": torch}
    likeness, choose = (
        released(file, f"LlavaMetaForCausalLM.{name}", names) for name in ("pairwise_cosine_similarity", "DivPrune")
    )
    recordings = []
    for seed, (images, ratio) in enumerate([(576, 0.098), (576, 0.3), (90, 0.9)]):
        drawn = {"seed": 10 * seed, "layers": 0, "before": 5, "images": images, "behind": 7}
        prompt = Prompt.draw(**drawn)
        tokens = prompt.hidden[prompt.vision]
        model = SimpleNamespace(pairwise_cosine_similarity=partial(likeness, None))
        places, _ = choose(model, tokens, images, threshold_ratio=ratio)
        recordings.append(TokenRecording("divprune", "divprune", {}, drawn, len(places), [tokens[places]]))
    functions = "LLaVA/llava/model/llava_arch.py: LlavaMetaForCausalLM.DivPrune, pairwise_cosine_similarity"
    save("divprune", recordings, "vbdi/divprune", checkout, functions)


if __name__ == "__main__":
    main()
