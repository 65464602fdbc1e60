"""vllm-project/vllm: compute_retention_mask, EVS as its authors brought it into vLLM."""

from pathlib import Path

import torch

from .dycoke import TOKENS, draw
from .token_recording import Recordings, TokenRecording, of_video, released, run

MERGE = 2  # patches of 2 x 2 are a token


def ours(recording: TokenRecording) -> list[torch.Tensor]:
    return of_video(recording, draw(**recording.drawn))


def recordings(checkout: Path) -> Recordings:
    names, file = {"torch": torch}, checkout / "vllm/multimodal/evs.py"
    for name in ("compute_retained_tokens_count", "compute_retention_mask"):
        mask = released(file, name, names)
    for seed, (frames, rate) in enumerate([(8, 0.7), (16, 0.5), (10, 0.9)]):
        drawn = {"seed": 10 * seed, "frames": frames}
        video = draw(**drawn).flatten(0, 1)
        grid = (frames, 5 * MERGE, TOKENS // 5 * MERGE)
        states = video[mask(video, grid, MERGE, rate)]
        yield TokenRecording("evs", "evs", {}, drawn, len(states), [states])


if __name__ == "__main__":
    functions = "vllm/multimodal/evs.py: compute_retention_mask, compute_retained_tokens_count"
    run(recordings, "vllm-project/vllm", functions)
