"""vllm-project/vllm, pull request 47967, kvcrush.py, with pages of one token."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording, kept_columns
from .released import definitions
from .script import Recordings, run
from .states import NAMES, cases, states

COMMIT = "ea297c9c5fdcb7151a9cc11ab8dacb5aa0722e4a"  # of `git fetch origin pull/47967/head`
ANCHORS = {"alternating": "alternate", "zeros": "mean"}  # of half the tokens: no bit is set in more than half

FIRST_HEAD = (
    "representatives of every head are chosen among what the first KV head would evict: other heads get some that they "
    "keep anyway, and hold as many entries less"
)
ROUNDED = "linspace rounds some steps down to the column before where they are whole numbers"
EACH_FIRST = "kvcrush, each head first, anchor=zeros, representatives="
DIFFERENCES = {
    "kvcrush, anchor=alternating": (0.85, FIRST_HEAD),
    f"{EACH_FIRST}0.6/tiny/378+0/189": (0.99, ROUNDED),
}


def recordings(checkout: Path) -> Recordings:
    path = checkout / "vllm/v1/attention/backends/kvcrush.py"
    # Most tokens are as far from the anchor as others; its sort leaves their order open.
    stable = SimpleNamespace(**{**vars(torch), "sort": partial(torch.sort, stable=True)})
    stand_ins = {"torch": stable, "logger": SimpleNamespace(info=lambda *_: None)}
    theirs = definitions(path, "H2OKVCrushCluster", **stand_ins)["H2OKVCrushCluster"]

    def keep(name: str, place: int, prompt: int, budget: int, anchor: str, part: float, head: int) -> torch.Tensor:
        """What is kept if the heads begin with this one."""
        queries, keys, values = states(name).layer(place, slice(0, prompt))
        keys, values, queries = keys.roll(-head, 1), values.roll(-head, 1), queries.roll(-head * states(name).groups, 1)
        cluster = theirs(
            window_size=16, recent_size=8, max_capacity_prompt=budget - 8 - 4, kvcrush_ratio=part, start_size=4,
            anchor_mode=ANCHORS[anchor], block_size=1,
        )  # fmt: skip
        stays, _ = cluster.update_kv(keys, queries, values, page_size=1)
        return kept_columns(stays[0], keys[0])

    for name in NAMES:
        places, heads = range(states(name).layers), range(states(name).keys.shape[1])
        for prompt, budget in cases(name):
            if budget <= 12 or budget >= prompt:
                continue  # sinks and recent tokens, and something between
            for anchor, part, each_first in (
                ("alternating", 0.25, False),
                ("zeros", 0.25, True),
                ("zeros", 0.6, True),
            ):
                if int((budget - 12) * part) == 0:
                    continue  # it holds one representative more than the budget
                given = (prompt, budget, anchor, part)
                if each_first:
                    kept = [torch.stack([keep(name, place, *given, head)[0] for head in heads]) for place in places]
                    label = f"{EACH_FIRST}{part}"
                else:
                    kept = [keep(name, place, *given, 0) for place in places]
                    label = f"kvcrush, anchor={anchor}"
                options = {"recent": 8, "anchor": anchor, "representatives": part}
                yield Recording(label, "kvcrush", options, name, prompt, budget, torch.stack(kept))


if __name__ == "__main__":
    functions = "vllm/v1/attention/backends/kvcrush.py: H2OKVCrushCluster.update_kv"
    run(recordings, "vllm-project/vllm", functions, COMMIT)
