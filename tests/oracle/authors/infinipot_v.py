"""aiha-lab/InfiniPot-V: a block of video frames behind a system prompt, brought down to a number of frames."""

from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording, kept_columns
from .released import definitions
from .script import Recordings, run
from .states import RATIOS, states

FILE = "kvcache_utils.py"
FUNCTION = "process_kv_cache"
# states -> tokens per frame; the prompt ends with the last whole frame.
FRAMES = {"random_gqa": 16, "random_mha": 16, "random_gqa_image": 14, "smollm2_image": 24, "tiny": 27}
PARTS = (0.9, 0.7, 0.55)  # of the frames that are kept; with less than twice those that count as recent it fails

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    theirs = definitions(checkout / FILE, FUNCTION)[FUNCTION]
    for name, size in FRAMES.items():
        given = states(name)
        system, end = given.vision
        frames = (end - system) // size
        prompt = system + frames * size
        model = SimpleNamespace(
            model=SimpleNamespace(language_model=SimpleNamespace(layers=range(given.layers))), config=SimpleNamespace()
        )
        stays = [(int(part * frames), None) for part in PARTS]
        if name == "smollm2_image":  # as many frames as are nearest
            near = [(round((ratio * prompt - system) / size), ratio) for ratio in RATIOS]
            stays += [(stay, ratio) for stay, ratio in near if stay >= 2 * int(frames / 4)]
        for stay, ratio in stays:
            layers = [given.layer(place, slice(0, prompt)) for place in range(given.layers)]
            held = [SimpleNamespace(keys=keys, values=values) for _, keys, values in layers]
            cache = SimpleNamespace(layers=held, get_seq_length=lambda prompt=prompt: prompt)
            theirs(cache, model, system, 0, size, stay, method="infinipot-v")
            of_layers = zip(held, layers, strict=True)
            kept = torch.stack([kept_columns(layer.keys[0], keys[0]) for layer, (_, keys, _) in of_layers])
            budget, options = system + stay * size, {"frame_tokens": size}
            yield Recording("infinipot-v", "infinipot-v", options, name, prompt, budget, kept, ratio=ratio)


if __name__ == "__main__":
    run(recordings, "aiha-lab/InfiniPot-V", f"{FILE}: {FUNCTION}")
