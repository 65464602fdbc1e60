"""vllm-project/vllm: compute_retention_mask, EVS as its authors brought it into vLLM."""

import sys
from pathlib import Path

import torch

from kvcompress.methods import make_method
from kvcompress.tokens import Tokens

from .dycoke import SIZE, TOKENS, draw
from .token_recording import TokenRecording, released, save

MERGE = 2  # patches of 2 x 2 are a token


def ours(recording: TokenRecording) -> list[torch.Tensor]:
    video, method = draw(**recording.drawn), make_method(recording.method, **recording.options)
    hidden = torch.cat([video.flatten(0, 1), torch.zeros(1, SIZE)])[None]  # and a text
    vision = torch.arange(hidden.shape[1])[None] < hidden.shape[1] - 1
    frames = [[torch.arange(vision.shape[1] - 1).view(len(video), TOKENS)]]
    tokens = Tokens(vision, None, [recording.budget], hidden, frames=frames)
    chosen, hidden = method.choose(method.score(tokens), tokens)
    return [hidden[chosen]]


def main() -> None:
    checkout = Path(sys.argv[1])
    names, file = {"torch": torch}, checkout / "vllm/multimodal/evs.py"
    for name in ("compute_retained_tokens_count", "compute_retention_mask"):
        mask = released(file, name, names)
    recordings = []
    for seed, (frames, rate) in enumerate([(8, 0.7), (16, 0.5), (10, 0.9)]):
        drawn = {"seed": 10 * seed, "frames": frames}
        video = draw(**drawn).flatten(0, 1)
        grid = (frames, 5 * MERGE, TOKENS // 5 * MERGE)
        states = video[mask(video, grid, MERGE, rate)]
        recordings.append(TokenRecording("evs", "evs", {}, drawn, len(states), [states]))
    functions = "vllm/multimodal/evs.py: compute_retention_mask, compute_retained_tokens_count"
    save("evs", recordings, "vllm-project/vllm", checkout, functions)


if __name__ == "__main__":
    main()
