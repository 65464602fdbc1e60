"""SalesforceAIResearch/ThinK: what keys are after SnapKV and the pruning of channels (kv_pruning_utils.py). It repeats
keys for the query heads of a KV head, so that only states with a KV head per query head say the same here."""

from pathlib import Path

import torch

from .recording import Recording, kept_columns
from .released import definitions
from .script import Recordings, prompts, run
from .states import states

FILE = "ThinK_eager/src/kv_pruning_utils.py"
CLASS = "SnapKVCluster"
STATES = ("random_mha",)
# Part of the channels that is pruned there -> that stays here.
RATIOS = {0.4: 0.6, 0.7: 0.3}
RECENT = 16  # no more than SnapKV's window: behind it their entries lie by score, so that others would be recent

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    theirs = definitions(checkout / FILE, CLASS, "key_pruner_query_driven")[CLASS]
    for name, prompt, budget in prompts(STATES):
        if prompt == states(name).prompt or not RECENT < budget < prompt:  # a small file
            continue
        for pruned, part in RATIOS.items():
            yield recording(theirs, name, prompt, budget, pruned, part)


def recording(theirs: type, name: str, prompt: int, budget: int, pruned: float, part: float) -> Recording:
    given, kept, held = states(name), [], []
    for place in range(given.layers):
        queries, keys, values = given.layer(place, slice(0, prompt))
        cluster = theirs(window_size=RECENT, max_capacity_prompt=budget, recent_size=RECENT, ratio=pruned)
        thin, recent, mask, kept_values = cluster.update_thinkv(keys, queries, values, None, 1)
        whole = torch.zeros(*thin.shape[:3], keys.shape[3])
        whole[mask[:, :, None].expand_as(whole)] = thin.flatten()
        of_layer = kept_columns(kept_values[0], values[0])
        # Ours lie in the order of their columns.
        order = torch.stack([_columns(some, all_) for some, all_ in zip(kept_values[0], values[0], strict=True)])
        order = order.argsort(-1)[..., None].expand(-1, -1, keys.shape[3])
        held.append(torch.cat([whole, recent], 2)[0].gather(1, order))
        kept.append(of_layer)
    options = {"cache_implementation": "think", "key_channels": part, "key_recent": RECENT, "window_size": RECENT}
    label = f"snapkv, cache_implementation=think, key_channels={part}"
    return Recording(label, "snapkv", options, name, prompt, budget, torch.stack(kept), keys=torch.stack(held))


def _columns(some: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """The column of each of the vectors `some` (entries, head_dim) in `among` (tokens, head_dim)."""
    return (some[:, None] == among[None]).all(-1).int().argmax(1)


if __name__ == "__main__":
    run(recordings, "SalesforceAIResearch/ThinK", f"{FILE}: {CLASS}.update_thinkv")
