"""Theia-4869/VisPruner: encode_images, which chooses by its CLIP tower's attention and features."""

from pathlib import Path
from types import SimpleNamespace

import torch

from .token_recording import Recordings, Tile, TokenRecording, released, run, seen

SIDE = 24  # CLIP-L's

ours = seen


def recordings(checkout: Path) -> Recordings:
    encode = released(checkout / "llava/model/llava_arch.py", "LlavaMetaForCausalLM.encode_images", {"torch": torch})
    for seed, (budget, important) in enumerate([(128, 0.5), (64, 0.5), (192, 0.2), (100, 1.0)]):
        drawn = {"seed": 10 * seed, "side": SIDE}
        tile = Tile.draw(**drawn)
        queries, keys = ((tile.states @ w).unflatten(-1, (tile.heads, -1)).transpose(1, 2) for w in tile.weights)
        weights = (queries[:, :, :1] @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5).softmax(-1)[:, :, 0, 1:]
        model = SimpleNamespace(
            get_vision_tower=lambda tile=tile, weights=weights: lambda images, **_: (tile.features[:, 1:], weights),
            mm_projector=lambda states: states,
            get_visual_token_num=lambda budget=budget: budget,
            get_important_ratio=lambda important=important: important,
        )
        model.get_model = lambda model=model: model
        states, masks = encode(model, None)
        options = {} if important == 0.5 else {"important": important}
        label = "vispruner" if not options else f"vispruner, important={important}"
        yield TokenRecording(label, "vispruner", options, drawn, budget, [states[masks]])


if __name__ == "__main__":
    functions = "llava/model/llava_arch.py: LlavaMetaForCausalLM.encode_images"
    run(recordings, "Theia-4869/VisPruner", functions)
