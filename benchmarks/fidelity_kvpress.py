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
# The folders of the bench's worker and of the recordings replace this script's: its kernels.py would shadow a package.
ROOT = Path(__file__).parents[1]
sys.path[0:1] = [str(ROOT / "kvcompress" / "bench"), str(ROOT / "tests" / "oracle")]

import kvpress
import numpy as np
import torch
from kvpress.presses import kvzip_press
from kvpress_worker import FORMS, PRESSES
from make_kvpress_fixtures import LayerInput, columns, draw_as_ours, finch, kept_columns, run
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

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


def with_window(removed: float) -> kvpress.FinchPress:
    press = finch(32)
    press.compression_ratio = removed
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
    Run("finch", with_window),
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
