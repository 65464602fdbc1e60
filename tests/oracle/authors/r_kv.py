"""Zefan-Cai/R-KV with run_math.py's lambda 0.07. It asserts that a budget exceeds the window. Its model cuts the prompt
and then whenever the length is a multiple of 128; here after every 32 decoded tokens, as ours is told to."""

from pathlib import Path

import torch

from .recording import Recording, kept_columns
from .released import definitions
from .script import Recordings, prompts, run
from .states import DECODED, NAMES, states

WINDOW, INTERVAL = 8, 32

ORDER = "its entries lie by score, and it pools and finds the latest of like keys there; ours are in their order"
DIFFERENCES = {
    f"r-kv/{name}/{length}+{DECODED}": (0.78, ORDER)
    for name in NAMES
    for length in (states(name).prompt, states(name).prompt // 3)
}


def recordings(checkout: Path) -> Recordings:
    utils = definitions(checkout / "rkv/utils.py", "cal_similarity", "compute_attention_scores")
    names = {name: utils[name] for name in ("cal_similarity", "compute_attention_scores")}
    theirs = definitions(checkout / "rkv/compression/r1_kv.py", "R1KV", **names)["R1KV"]

    def keep(name: str, place: int, prompt: int, decoded: int, budget: int) -> torch.Tensor:
        given, cluster = states(name), theirs(budget=budget, window_size=WINDOW)
        queries, keys, values = given.layer(place)
        stored = [x[:, :, :prompt] for x in (keys, values)]
        for now in range(prompt, prompt + decoded + 1):
            if (now - prompt) % INTERVAL == 0:
                stored = cluster.update_kv(stored[0], queries[:, :, now - WINDOW : now], stored[1])
            if now < prompt + decoded:
                stored = [
                    torch.cat([a, b[:, :, now : now + 1]], 2) for a, b in zip(stored, (keys, values), strict=True)
                ]
        return kept_columns(stored[0][0], keys[0, :, : prompt + decoded])

    for name, prompt, budget in prompts():
        for decoded in (0, DECODED):
            if budget > WINDOW:
                kept = torch.stack([keep(name, place, prompt, decoded, budget) for place in range(states(name).layers)])
                options = {"decode_budget": budget, "decode_interval": INTERVAL} if decoded else {}
                yield Recording("r-kv", "r-kv", options, name, prompt, budget, kept, decoded)


if __name__ == "__main__":
    functions = "rkv/compression/r1_kv.py: R1KV.update_kv; rkv/utils.py: cal_similarity, compute_attention_scores"
    run(recordings, "Zefan-Cai/R-KV", functions)
