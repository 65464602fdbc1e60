"""xuyang-liu16/VidCom2: vidcom2_compression, which chooses among a video's projected tokens."""

from pathlib import Path

import torch
import torch.nn.functional as F

from .token_recording import Recordings, TokenRecording, normal, of_video, released, run

FILE = "token_compressor/vidcom2/vidcom2.py"
TOKENS, SIZE = 30, 12  # of a frame


def draw(seed: int, frames: int) -> torch.Tensor:
    """A video (frames, TOKENS, SIZE) whose frames are alike, some less than others."""
    change = 0.2 + normal(seed + 2, frames, 1, 1).abs()
    return normal(seed, 1, TOKENS, SIZE) + change * normal(seed + 1, frames, TOKENS, SIZE)


def ours(recording: TokenRecording) -> list[torch.Tensor]:
    return of_video(recording, draw(**recording.drawn))


def recordings(checkout: Path) -> Recordings:
    names = {"torch": torch, "F": F, "MODEL_SPECS": {"qwen2_5_vl": {"tpf": None, "mapper": "linear"}}}
    parts = ("select_low_var_channels", "_multi_scale_gaussian", "compute_gaussian_scores", "compute_scales")
    for name in (*parts, "select_outlier_indices", "_map_linear_offset", "map_features"):
        released(checkout / FILE, name, names)
    compress = released(checkout / FILE, "vidcom2_compression", names)
    for seed, (frames, ratio) in enumerate([(8, 0.25), (16, 0.25), (16, 0.5), (32, 0.15), (10, 0.8)]):
        drawn = {"seed": 10 * seed, "frames": frames}
        states = compress(draw(**drawn).flatten(0, 1), "qwen2_5_vl", ratio, TOKENS)
        yield TokenRecording("vidcom2", "vidcom2", {}, drawn, len(states), [states])


if __name__ == "__main__":
    run(recordings, "xuyang-liu16/VidCom2", f"{FILE}: vidcom2_compression")
