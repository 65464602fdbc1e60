"""dvlab-research/VisionZip: its CLIP tower's choice and merging, by its CLIP attention."""

from pathlib import Path
from types import SimpleNamespace

import torch

from .token_recording import Recordings, Tile, TokenRecording, released, run, seen

SIDE = 24  # CLIP-L's

ours = seen


def recordings(checkout: Path) -> Recordings:
    utils = {"torch": torch, "nn": torch.nn}
    attend = released(checkout / "visionzip/utils.py", "CLIPAttention_forward", utils)
    forward = released(checkout / "visionzip/clip_encoder.py", "CLIPVisionTower_VisionZip.forward", {"torch": torch})
    for seed, (dominant, contextual) in enumerate([(54, 10), (108, 20), (162, 30)]):
        drawn = {"seed": 10 * seed, "side": SIDE}
        tile = Tile.draw(**drawn)
        weights, metric = attended(tile, attend)
        # What `visionzip(model, dominant, contextual)` sets up, and what the tower then gives.
        tower = Tower(tile, weights, metric, {"dominant": dominant - 1, "contextual": contextual})
        states, _ = forward(SimpleNamespace(vision_tower=tower, device="cpu", dtype=torch.float32), tile.features)
        budget = dominant + contextual
        label = "visionzip" if budget == 64 else f"visionzip, {budget}"
        options = {} if budget == 64 else {"contextual": contextual / budget}
        yield TokenRecording(label, "visionzip", options, drawn, budget, [states[0]])


class Tower:
    """Gives what is in `tile` as the last but one layer's."""

    def __init__(self, tile: Tile, weights: torch.Tensor, metric: torch.Tensor, info: dict[str, int]):
        self.output = SimpleNamespace(attentions=[weights, None], hidden_states=[tile.features, None])
        layers = [SimpleNamespace(metric=metric), None]
        self.vision_model, self._info = SimpleNamespace(encoder=SimpleNamespace(layers=layers)), info

    def __call__(self, images: torch.Tensor, **_: object) -> SimpleNamespace:
        return self.output


def attended(tile: Tile, attend) -> tuple[torch.Tensor, torch.Tensor]:
    """By the released attention: its weights (1, heads, tokens, tokens), and its keys in the mean over heads."""
    size = tile.states.shape[-1] // tile.heads
    queries, keys = (lambda states, w=w: states @ w for w in tile.weights)
    module = SimpleNamespace(
        q_proj=queries, k_proj=keys, v_proj=keys, out_proj=torch.nn.Identity(), scale=size**-0.5, num_heads=tile.heads,
        head_dim=size, dropout=0.0, training=False,
        _shape=lambda x, length, batch: x.view(batch, length, tile.heads, size).transpose(1, 2).contiguous(),
    )  # fmt: skip
    _, weights, metric = attend(module, tile.states, output_attentions=True)
    return weights, metric


if __name__ == "__main__":
    functions = "visionzip/clip_encoder.py: CLIPVisionTower_VisionZip.forward; utils.py: CLIPAttention_forward"
    run(recordings, "dvlab-research/VisionZip", functions)
