"""Theia-4869/CDPruner: encode_images, which chooses among the image's projected tokens.

Of the two sides of its relevance the text is given with its sign turned around: the released code takes the negative,
as is right for CLIP, and its authors elsewhere the cosine itself.
"""

from pathlib import Path
from types import SimpleNamespace

import torch

from .token_recording import Prompt, Recordings, TokenRecording, chosen, released, run

ours = chosen


def recordings(checkout: Path) -> Recordings:
    file = checkout / "llava/model/llava_arch.py"
    encode = released(file, "LlavaMetaForCausalLM.encode_images", {"torch": torch})
    for seed, (images, kept) in enumerate([(576, 64), (200, 80), (90, 30)]):
        drawn = {"seed": 10 * seed, "layers": 0, "before": 5, "images": images, "behind": 7, "size": 96}
        prompt = Prompt.draw(**drawn)
        tokens, text = prompt.hidden[prompt.vision], -prompt.hidden[0, -7:]
        model = SimpleNamespace(
            get_vision_tower=lambda tokens=tokens, text=text: lambda images, texts: (tokens[None], tokens[None], text),
            mm_projector=lambda states: states,
            visual_token_num=kept,
        )
        model.get_model = lambda model=model: model
        states, masks = encode(model, None)
        yield TokenRecording("cdpruner", "cdpruner", {}, drawn, kept, [states[masks]])


if __name__ == "__main__":
    functions = "llava/model/llava_arch.py: LlavaMetaForCausalLM.encode_images"
    run(recordings, "Theia-4869/CDPruner", functions)
