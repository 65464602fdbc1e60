"""SUSTechBruce/LOOK-M: text-prior selection with pivotal and weighted merging, of one image in the prompt."""

from pathlib import Path

import torch

from .recording import Recording
from .released import attention, definitions, of_kv_heads
from .script import Recordings, prompts, run
from .states import NAMES, WITH_IMAGE, states

FILE = "LLaVA-mix_merge_v1/llava/model/kv_token_merge/modify_llama.py"
MERGES = {"pivot": "TextPivotMerge_LayerWise", "weighted": "TextWeightedMerge_LayerWise"}

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:
    def recording(
        label: str, name: str, prompt: int, budget: int, merge: str = "", with_states: bool = False
    ) -> Recording:
        """Half of the budget is recent tokens, as the two ratios of a tenth in the released script. Where text is more
        than the rest, theirs keeps it nevertheless: then ours is asked for what that makes."""
        given, recent = states(name), budget // 2
        first, end = given.vision[0], min(given.vision[1], prompt)
        in_llava = {576: end - first, 575: end - first - 1, 128: given.keys.shape[3]}
        class_name = MERGES[merge or "pivot"]
        theirs = definitions(checkout / FILE, class_name, constants=in_llava)[class_name]
        kept, stored = [], ([], [])
        for place in range(given.layers):
            queries, keys, values = given.layer(place, slice(0, prompt))
            cache = theirs(hh_size=budget - recent, recent_size=recent)
            cache.image_position = torch.tensor([first])
            result = cache((keys.double(), values.double()), of_kv_heads(attention(queries, keys), given))
            kept.append(torch.ones(keys.shape[1:3], dtype=torch.bool) if budget >= prompt else cache.hh_score >= 0)
            for to, of_layer in zip(stored, result, strict=True):
                to.append(of_layer[0].float())
        options, size = {"merge": merge} if merge else {}, int(kept[0][0].sum())
        if size != budget < prompt:
            label, options["recent"] = "look-m, all text", (recent + 0.5) / size
        merged = {"keys": torch.stack(stored[0]), "values": torch.stack(stored[1])} if with_states else {}
        return Recording(label, "look-m", options, name, prompt, max(size, budget), torch.stack(kept), **merged)

    for name, prompt, budget in prompts((*WITH_IMAGE, *NAMES)):
        if states(name).vision[1]:
            yield recording("look-m", name, prompt, budget)
    for merge in MERGES:
        label = f"look-m, {merge} merging"
        yield recording(label, "random_gqa_image", 100, 10, merge, with_states=True)


if __name__ == "__main__":
    run(recordings, "SUSTechBruce/LOOK-M", f"{FILE}: {', '.join(MERGES.values())}")
