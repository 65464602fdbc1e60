"""mit-han-lab/duo-attention: which heads stream at a sparsity, and what they and the others hold of a prompt and of 64
tokens that are decoded behind it, with gates that are drawn.

It keeps a number of heads whole, here a budget is a number of entries: recorded is what has as many.
"""

import json
import os
import tempfile
import types
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from .recording import Recording, kept_columns
from .released import definitions
from .script import Recordings, run
from .states import DECODED, NAMES, RATIOS, States, states

SINKS, RECENT = 4, 16
SPARSITIES = (0.25, 0.5, 0.75)  # of all heads, those that stream
ENABLE, ATTEND = "enable_llama_duo_attention_eval", "llama_duo_attention_forward_one_way_reordered"

LABEL = f"duoattention, {SINKS} + {RECENT}"  # short, for the table

SHARES = "while decoding layers share a budget of whole entries as in the prompt; there what streams grows no more"
DIFFERENCES = {
    f"{LABEL}/{name}/{length}+{DECODED}": (0.89, SHARES)
    for name in NAMES
    for length in (states(name).prompt, states(name).prompt // 3)
}


def recordings(checkout: Path) -> Recordings:
    folder = checkout / "duo_attn"
    theirs = definitions(folder / "utils.py", "load_attn_pattern", "sparsify_attention_heads", json=json, os=os)
    reordering = definitions(folder / "patch/utils.py", "reorder_linear_weights", "reorder_full_attn_heads")
    stand_ins = {
        "types": types,
        "enable_tuple_kv_cache_for_llama": lambda model: None,
        "apply_rotary_pos_emb": lambda queries, keys, *args, **kwargs: (queries, keys),
        "flash_attn_func": lambda queries, *args, **kwargs: queries,
    }
    enable = definitions(folder / "patch/llama.py", ENABLE, ATTEND, **reordering, **stand_ins)[ENABLE]

    def pattern(given: States, sparsity: float) -> tuple[torch.Tensor, np.ndarray]:
        """The gates of a pattern that is read from files as theirs are, and the heads that keep all."""
        gates = np.random.Generator(np.random.PCG64(0)).random(given.keys.shape[:2])
        with tempfile.TemporaryDirectory() as folder:
            np.savetxt(Path(folder) / "full_attention_heads.tsv", gates, delimiter="\t")
            (Path(folder) / "config.json").write_text(json.dumps({"sink_size": SINKS, "recent_size": RECENT}))
            read, _, _ = theirs["load_attn_pattern"](folder)
        return torch.from_numpy(gates).float(), theirs["sparsify_attention_heads"](read, None, sparsity)[0]

    def keep(given: States, heads: np.ndarray, prompt: int, decoded: int) -> torch.Tensor:
        model = SimpleNamespace(model=SimpleNamespace(layers=[_layer(given) for _ in heads]))
        model.parameters = lambda: iter([given.keys])
        enable(model, heads, SINKS, RECENT)
        kept = []
        for place, layer in enumerate(model.model.layers):
            past = None
            for tokens in (slice(0, prompt), *(slice(t, t + 1) for t in range(prompt, prompt + decoded))):
                hidden = torch.cat([part.transpose(1, 2).flatten(2) for part in given.layer(place, tokens)], 2)
                _, _, past = layer.self_attn.forward(hidden, past_key_value=past, use_cache=True)
            is_full = torch.from_numpy(heads[place] > 0.5)
            order = torch.cat([is_full.nonzero(), (~is_full).nonzero()]).flatten()
            among = given.keys[place, :, : prompt + decoded]
            of_layer = torch.empty(among.shape[:2], dtype=torch.bool)
            stored = [head for part in past for head in part[0]]  # keys, those of whole heads first
            for head, entries in zip(order.tolist(), stored, strict=True):
                of_layer[head] = kept_columns(entries[None], among[head : head + 1])
            kept.append(of_layer)
        return torch.stack(kept)

    def recorded(name: str, prompt: int, sparsity: float, ratio: float | None = None) -> Recordings:
        given = states(name)
        gates, heads = pattern(given, sparsity)
        for decoded in (0, DECODED):
            in_prompt, kept = (keep(given, heads, prompt, n) for n in (0, decoded))
            budget, later = (int(part.sum()) // gates.numel() for part in (in_prompt, kept))
            if budget * gates.numel() != in_prompt.sum():
                continue  # no budget is the same
            options = {"sinks": SINKS, "recent": RECENT, **({"decode_budget": later} if decoded else {})}
            known = {"gates": gates}
            asked = (LABEL, "duoattention", options, name, prompt, budget)
            yield Recording(*asked, kept, decoded, ratio=ratio, known=known)

    for name in NAMES:
        whole = states(name).prompt
        for prompt, sparsity in product((whole, whole // 3), SPARSITIES):
            yield from recorded(name, prompt, sparsity)
    prompt, heads = states("smollm2").prompt, states("smollm2").keys.shape[:2].numel()
    for ratio in RATIOS:
        full = round(heads * (ratio * prompt - SINKS - RECENT) / (prompt - SINKS - RECENT))
        yield from recorded("smollm2", prompt, 1 - full / heads, ratio)


def _layer(given: States) -> SimpleNamespace:
    """A layer whose hidden states are its queries, keys and values, side by side."""
    heads, kv_heads, head_dim = given.queries.shape[1], given.keys.shape[1], given.keys.shape[3]
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    module = torch.nn.Module()
    for part, rows in zip("qkv", torch.eye(sum(sizes)).split(sizes), strict=True):
        linear = torch.nn.Linear(*rows.shape[::-1], bias=False)
        linear.weight = torch.nn.Parameter(rows, requires_grad=False)
        setattr(module, f"{part}_proj", linear)
    module.o_proj = torch.nn.Linear(sizes[0], sizes[0], bias=False).requires_grad_(False)
    module.rotary_emb = lambda values, positions: (None, None)
    module.num_heads, module.num_key_value_heads, module.num_key_value_groups = heads, kv_heads, given.groups
    module.head_dim, module.hidden_size = head_dim, sizes[0]
    return SimpleNamespace(self_attn=module)


if __name__ == "__main__":
    functions = f"duo_attn/utils.py: load_attn_pattern, sparsify_attention_heads; patch/llama.py: {ENABLE}, {ATTEND}"
    run(recordings, "mit-han-lab/duo-attention", functions)
