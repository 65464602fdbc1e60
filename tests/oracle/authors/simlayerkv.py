"""sail-sg/SimLayerKV (Llama): once the first token is decoded, layers in which it is lazy are cut, with it among their
entries: as a prompt that is one token longer. It looks at, and keeps, 1024 recent tokens; here a number that our short
prompts exceed."""

from pathlib import Path
from types import SimpleNamespace

import torch

from .recording import Recording, kept_columns
from .released import branch, definitions, repeat_kv
from .script import Recordings, run
from .states import NAMES, cases, states

ATTENTION, MODEL = "LongBench/SimLayerKV_attention_llama.py", "LongBench/SimLayerKV_llama.py"
CONDITION = "(torch.tensor(bos_probs).sum() != 0) & (torch.tensor(bos_weights).sum() == 0)"
SINKS = 4

DIFFERENCES: dict[str, tuple[float, str]] = {}


def recordings(checkout: Path) -> Recordings:

    def laziness(name: str, prompt: int, recent: int) -> list[float]:
        """What the last of these tokens spends on first and recent ones in each layer."""
        given, found = states(name), []
        scaled = definitions(checkout / ATTENTION, "scaled_dot_product_attention")["scaled_dot_product_attention"]
        attend = definitions(
            checkout / ATTENTION,
            "ori_forward",
            constants={1024: recent},
            scaled_dot_product_attention=scaled,
            apply_rotary_pos_emb=lambda queries, keys, cos, sin: (queries, keys),
            repeat_kv=repeat_kv,
        )["ori_forward"]
        for place in range(given.layers):
            queries, keys, values = given.layer(place, slice(0, prompt))
            new = [x[:, :, -1:].transpose(1, 2).flatten(2) for x in (queries, keys, values)]
            layer = SimpleNamespace(
                q_proj=lambda _, new=new: new[0], k_proj=lambda _, new=new: new[1], v_proj=lambda _, new=new: new[2],
                o_proj=lambda output: output, num_heads=queries.shape[1], num_key_value_heads=keys.shape[1],
                num_key_value_groups=given.groups, head_dim=keys.shape[3], layer_idx=place, training=False,
            )  # fmt: skip
            cache = SimpleNamespace(update=lambda *args, keys=keys, values=values: (keys, values))
            hidden = torch.empty(1, 1, 1)
            found.append(attend(layer, hidden, past_key_value=cache, position_embeddings=(0, 0))[3].item())
        return found

    def recording(name: str, prompt: int, budget: int) -> Recording:
        given, recent = states(name), budget - SINKS
        spent = laziness(name, prompt, recent)
        threshold = round(sorted(spent)[given.layers // 2] - 1e-3, 3)  # half of the layers are lazy
        stored = [[x[:, :, :prompt] for x in given.layer(place)[1:]] for place in range(given.layers)]
        cache = SimpleNamespace(key_cache=[x[0] for x in stored], value_cache=[x[1] for x in stored])
        branch(
            checkout / MODEL,
            CONDITION,
            constants={1024: recent},
            bos_probs=spent,
            bos_weights=[],
            threshold_stream=threshold,
            next_decoder_cache=cache,
            past_key_values=SimpleNamespace(key_cache=list(cache.key_cache), value_cache=list(cache.value_cache)),
        )
        kept = [kept_columns(keys[0], given.keys[place, :, :prompt]) for place, keys in enumerate(cache.key_cache)]
        options = {"variant": "code", "lazy_threshold": threshold}
        return Recording("simlayerkv, variant=code", "simlayerkv", options, name, prompt, budget, torch.stack(kept))

    yield from [
        recording(name, prompt, budget) for name in NAMES for prompt, budget in cases(name) if SINKS < budget < prompt
    ]


if __name__ == "__main__":
    functions = f"{ATTENTION}: ori_forward; {MODEL}: LlamaModel.forward"
    run(recordings, "sail-sg/SimLayerKV", functions)
