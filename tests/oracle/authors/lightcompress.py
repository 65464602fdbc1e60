"""ModelTC/LightCompress: its DART, a port of the authors' function, which chooses before a decoder layer.

The pivots take turns in the order in which Python lists a set of numbers there. Here the set that the function uses
lists them in ascending order.
"""

from pathlib import Path

import torch

from .token_recording import Prompt, Recordings, TokenRecording, released, run, through

FILE, NAME = "llmc/compression/token_reduction/dart.py", "get_retained_image_token"
BEFORE, BEHIND = 7, 9

ours = through


class Ascending(set):
    """A set that lists numbers in ascending order."""

    def __iter__(self):
        return iter(sorted(super().__iter__()))


def theirs(choose, prompt: Prompt, layer: int, images: int, kept: int, pivots: tuple[int, int]) -> torch.Tensor:
    """The states that stay, of `kept` besides the vision pivots."""
    settings = {
        "vision_token_start_index": BEFORE, "vision_token_length": images, "pivot_image_token": pivots[0],
        "pivot_text_token": pivots[1], "reduction_ratio": 1 - kept / images,
    }  # fmt: skip
    _, keys = prompt.queries_and_keys(layer - 1, prompt.hidden)
    return prompt.hidden[0, choose(settings, prompt.hidden, keys).sort().values]


def recordings(checkout: Path) -> Recordings:
    choose = released(checkout / FILE, NAME, {"torch": torch, "set": Ascending})
    cases = [(2, 576, 128, (4, 4)), (2, 576, 64, (4, 4)), (1, 96, 24, (2, 6)), (3, 200, 150, (1, 3))]
    for seed, (layer, images, kept, pivots) in enumerate(cases):
        drawn = {"seed": 10 * seed, "layers": 5, "before": BEFORE, "images": images, "behind": BEHIND}
        states = theirs(choose, Prompt.draw(**drawn), layer, images, kept, pivots)
        options = {"layer": layer, "image_pivots": pivots[0], "text_pivots": pivots[1]}
        yield TokenRecording("dart", "dart", options, drawn, len(states), [states])


if __name__ == "__main__":
    run(recordings, "ModelTC/LightCompress", f"{FILE}: {NAME}")
