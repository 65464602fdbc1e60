"""42Shawn/LLaVA-PruMerge: its CLIP tower's token_prune_merge_advanced_plus, which is what its forward pass runs."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from .token_recording import Recordings, Tile, TokenRecording, released, run, seen

SIDE, LAYERS = 24, 24  # CLIP-L's, which the code takes for granted

ours = seen


class Tower(torch.nn.Module):
    """A CLIP tower whose last layer makes its queries and keys of what is in `tile`."""

    def __init__(self, tile: Tile):
        super().__init__()
        self.tile, size = tile, tile.states.shape[-1]
        self.q_proj, self.k_proj = (torch.nn.Linear(size, size, bias=False) for _ in range(2))
        for projection, weights in zip((self.q_proj, self.k_proj), tile.weights, strict=True):
            projection.weight = torch.nn.Parameter(weights.T, requires_grad=False)
        layers = [*[None] * (LAYERS - 1), SimpleNamespace(self_attn=self)]
        self.vision_model = SimpleNamespace(encoder=SimpleNamespace(layers=layers))

    def forward(self, images: torch.Tensor, **_: object) -> SimpleNamespace:
        self.q_proj(self.tile.states), self.k_proj(self.tile.states)
        # The features have as many numbers as the states: the code takes the attention's scale from theirs.
        return SimpleNamespace(hidden_states=[self.tile.features, None])


def recordings(checkout: Path) -> Recordings:
    file = checkout / "llava/model/multimodal_encoder/clip_encoder.py"
    names = {"torch": torch, "F": F, "np": np, "outputs": {}}
    for name in ("complement_idx", "hook_k", "hook_q", "outlier_dectection"):
        released(file, name, names)
    merge = released(file, "CLIPVisionTower.token_prune_merge_advanced_plus", names)
    select = released(file, "CLIPVisionTower.feature_select", names)
    for seed in range(3):
        drawn = {"seed": 10 * seed, "side": SIDE, "size": 16, "features": 16}
        tile = Tile.draw(**drawn)
        model = SimpleNamespace(
            vision_tower=Tower(tile), device="cpu", dtype=torch.float32, select_layer=-2, select_feature="patch"
        )
        model.feature_select = lambda outputs, model=model: select(model, outputs)
        states = merge(model, tile.features)
        count = states.shape[1]
        yield TokenRecording("prumerge+", "prumerge+", {}, drawn, count, [states[0]])
        adaptive = {"count": "outliers"}
        yield TokenRecording("prumerge+, adaptive", "prumerge+", adaptive, drawn, SIDE * SIDE, [states[0]])


if __name__ == "__main__":
    functions = "clip_encoder.py: CLIPVisionTower.token_prune_merge_advanced_plus"
    run(recordings, "42Shawn/LLaVA-PruMerge", functions)
