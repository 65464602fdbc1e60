"""KD-TAO/DyCoke: dycole_ttm, which merges a video's frames, and the cache that hides entries while decoding."""

import sys
from pathlib import Path

import torch

from kvcompress.methods import make_method
from kvcompress.tokens import Tokens

from .token_recording import TokenRecording, normal, released, save

TOKENS, SIZE = 30, 6  # of a frame


def draw(seed: int, frames: int) -> torch.Tensor:
    """A video (frames, TOKENS, SIZE) whose frames are alike."""
    return normal(seed, 1, TOKENS, SIZE) + normal(seed + 1, frames, TOKENS, SIZE)


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
    names = {"torch": torch}
    merge = released(checkout / "llava/model/llava_arch.py", "dycole_ttm", names)
    recordings = []
    for seed, (frames, rate) in enumerate([(8, 0.7), (16, 0.7), (16, 0.5), (10, 0.9)]):
        drawn = {"seed": 10 * seed, "frames": frames}
        states = merge(draw(**drawn).flatten(0, 1), TOKENS, rate)
        recordings.append(TokenRecording("dycoke", "dycoke", {}, drawn, len(states), [states]))
    functions = "llava/model/llava_arch.py: dycole_ttm"
    save("dycoke", recordings, "KD-TAO/DyCoke", checkout, functions)


if __name__ == "__main__":
    main()
