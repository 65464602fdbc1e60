"""kvpress's side of `python -m benchmarks.fidelity kvpress`: a script for the Python of an environment with kvpress.

It reads a JSON file {"model": a checkpoint's folder, "prompts": [{"ids": token ids, "budgets": entries per head}]} and
writes an npz file: `<run>/<prompt>/<budget>` is what the press kept, as bits: numpy.packbits of (layers, kv_heads,
tokens) along the last dimension. `about` is JSON: "runs" has, for each run, our "method" with the "options" that make
it choose the same, and "asked", the budgets to give it, [prompt][budget]; "versions" has those of the packages.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# ruff: noqa: E402
# The folder of the bench's worker replaces this script's, whose kernels.py would shadow a package.
sys.path[0] = str(Path(__file__).parents[1] / "kvcompress" / "bench")

import kvpress
import numpy as np
import torch
from kvpress.presses import kvzip_press, leverage_press
from kvpress.utils import get_prerope_query_states
from kvpress_worker import FORMS, PRESSES
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

KVZIP = "\n\nRepeat the previous context exactly."  # before the first chunk, as KVzipPress.prepare writes
LAZY = {"sinks": 4, "lazy_threshold": 0.9}


@dataclass(frozen=True)
class Run:
    """`make` takes the fraction that kvpress drops. A press that `sizes_itself` does not hold the budget: ours is asked
    for what its smallest head holds."""

    method: str
    make: Callable[[float], Any]
    options: dict[str, object] = field(default_factory=dict)
    sizes_itself: bool = False


def snapkv(removed: float) -> kvpress.SnapKVPress:
    return kvpress.SnapKVPress(removed)


def finch(removed: float) -> kvpress.FinchPress:
    press = kvpress.FinchPress(removed, rerotate_keys=False)
    press.window_size = 32  # it is the question's length, which the press finds by a delimiter
    return press


WINDOW, ADAPTIVE = {"window_size": 64}, {"head_budget": "adaptive-kvpress"}
RUNS = [
    *(Run(name, make, FORMS.get(name, {})) for name, make in PRESSES.items() if name not in ("full", "random", "h2o")),
    Run("h2o", kvpress.ObservedAttentionPress, {"recent": 0.0}),
    Run("vnorm", lambda r: kvpress.CURPress(r, 0, "value", use_local_approximation=False), {"variant": "kvpress"}),
    Run("cur", kvpress.CURPress),
    Run("capkv", kvpress.CapPress),
    Run("leverage", kvpress.LeverageScorePress, {"variant": "kvpress"}),
    Run("non-causal-attention", kvpress.NonCausalAttnPress, {"variant": "kvpress"}),
    Run("compactor", kvpress.CompactorPress, {"variant": "kvpress"}),
    Run("finch", finch),
    Run("chunkkv", lambda r: kvpress.ChunkKVPress(snapkv(r)), WINDOW, sizes_itself=True),
    Run("entropy-gated-chunkkv", lambda r: kvpress.EntropyGatedChunkKVPress(snapkv(r)), WINDOW),
    Run("criticalkv", lambda r: kvpress.CriticalKVPress(snapkv(r)), WINDOW),
    Run("criticalkv", lambda r: kvpress.CriticalAdaKVPress(snapkv(r)), WINDOW | ADAPTIVE),
    Run("keydiff", lambda r: kvpress.AdaKVPress(kvpress.KeyDiffPress(r)), ADAPTIVE),
    Run("expected-attention", lambda r: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(r, epsilon=1e-2)),
        {"epsilon": 0.01} | ADAPTIVE),
    Run("simlayerkv", lambda r: kvpress.SimLayerKVPress(0.9), LAZY | {"variant": "code"}, True),
    Run("kvzip", lambda r: kvpress.KVzipPress(r, n_sink=0), {"sinks": 0}),
    Run("kvcompose", lambda r: kvpress.KVComposePress(compression_ratio=r)),
]  # fmt: skip


def draw_as_ours() -> None:
    """Give the leverage press, whose Gaussian is a new one at each call, the one that ours draws with seed 0."""

    def gaussian(*shape: int, **kwargs: object) -> torch.Tensor:
        return torch.randn(shape[-2:], generator=torch.Generator().manual_seed(0)).expand(shape)

    leverage_press.torch = SimpleNamespace(**{**vars(torch), "randn": gaussian})


@dataclass
class LayerInput:
    """What one attention layer was given, and what it made of it."""

    module: torch.nn.Module
    hidden: torch.Tensor
    kwargs: dict
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def attentions(self) -> torch.Tensor:
        """(1, heads, length, length), as eager attention returns them."""
        length, head_dim = self.keys.shape[2:]
        groups = self.queries.shape[1] // self.keys.shape[1]
        logits = self.queries @ self.keys.repeat_interleave(groups, 1).mT * head_dim**-0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return logits.masked_fill(future, float("-inf")).softmax(-1)


@torch.no_grad()
def run(model: PreTrainedModel, ids: torch.Tensor) -> list[LayerInput]:
    """One prompt (1, length) through the model: the inputs and states of each layer."""
    calls = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append((module, kwargs)), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    inputs = []
    for (module, kwargs), stored in zip(calls, cache.layers, strict=True):
        module.rotary_emb = model.model.rotary_emb  # as a press does when it is attached
        module.masked_key_indices = None
        queries = get_prerope_query_states(module, kwargs["hidden_states"])
        queries, _ = apply_rotary_pos_emb(queries, queries, *kwargs["position_embeddings"])
        inputs.append(LayerInput(module, kwargs["hidden_states"], kwargs, queries, stored.keys, stored.values))
    return inputs


@torch.no_grad()
def kept_columns(press: kvpress.BasePress, layer: LayerInput) -> torch.Tensor:
    """bool (kv_heads, length): what the press keeps of one layer."""
    attentions = layer.attentions if isinstance(press, kvpress.ObservedAttentionPress) else None
    keys, _ = press.compress(layer.module, layer.hidden, layer.keys, layer.values, attentions, layer.kwargs)
    return columns(layer, keys)


def columns(layer: LayerInput, keys: torch.Tensor) -> torch.Tensor:
    """bool (kv_heads, length): which columns `keys` (1, kv_heads, kept, head_dim) holds and no mask hides."""
    kept = torch.stack([torch.isin(*of_head) for of_head in zip(marks(layer.keys), marks(keys), strict=True)])
    if layer.module.masked_key_indices is not None:  # head-wise presses mask instead of removing
        _, heads, masked = layer.module.masked_key_indices
        kept[heads, masked] = False
        layer.module.masked_key_indices = None
    return kept


def marks(keys: torch.Tensor) -> torch.Tensor:
    """int64 (kv_heads, keys): a number for each key (1, kv_heads, keys, head_dim), by all its bits. All keys of a head
    differ, by their rotation."""
    weights = torch.randint(2**62, keys.shape[-1:], generator=torch.Generator().manual_seed(0))
    return (keys[0].contiguous().view(torch.int32).long() * weights).sum(-1)


def kept(press: Any, model: PreTrainedModel, ids: torch.Tensor, layers: list[LayerInput]) -> torch.Tensor:
    """Return what a press keeps of a prompt (1, tokens): bool (layers, kv_heads, tokens)."""
    if isinstance(press, kvpress.KVComposePress):
        chosen = []
        press.compress_cache = lambda _: chosen.extend(map(torch.stack, press.important_mask_per_kv_head))
        with torch.no_grad(), press(model):
            model(ids, past_key_values=DynamicCache(), logits_to_keep=1)
        return torch.stack(chosen)
    if isinstance(press, kvpress.KVzipPress):
        with torch.no_grad(), press(model):
            model(ids, past_key_values=DynamicCache(), logits_to_keep=1)
        return torch.stack([columns(layer, layer.keys) for layer in layers])
    # Without the hook that drops a press's choice from the cache: no layer depends on what another one keeps.
    return torch.stack([kept_columns(press, layer) for layer in layers])


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    draw_as_ours()
    tokenizer = AutoTokenizer.from_pretrained(order["model"])
    tokenizer.chat_template = None  # prompts are plain text, so KVzip shall take no first tokens for a template's
    kvzip_press.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: tokenizer)
    instruction = [*tokenizer.encode(KVZIP), *tokenizer.encode("\n")]
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32).eval()
    arrays, runs = {}, []
    for one in RUNS:
        extra = {"instruction": instruction} if one.method == "kvzip" else {}
        runs.append({"method": one.method, "options": one.options | extra, "asked": []})
    for place, prompt in enumerate(order["prompts"]):
        ids = torch.tensor([prompt["ids"]])
        layers = run(model, ids)
        for number, (one, told) in enumerate(zip(RUNS, runs, strict=True)):
            told["asked"].append([])
            for budget in prompt["budgets"]:
                press = one.make(1 - (budget + 1e-6) / ids.shape[1])  # it keeps int((1 - removed) * length)
                mask = kept(press, model, ids, layers)
                arrays[f"{number}/{place}/{budget}"] = np.packbits(mask.numpy(), axis=-1)
                told["asked"][-1].append(int(mask.sum(-1).min()) if one.sizes_itself else budget)
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    np.savez(sys.argv[2], **arrays, about=json.dumps({"runs": runs, "versions": versions}))


if __name__ == "__main__":
    main()
