"""kvpress's side of the benchmark: a script for the Python of an environment with kvpress and without kvcompress.

It reads JSON lines. The first is {"source", "dtype", "device", "threads"}, answered by {"presses", "versions"}, where
`presses` maps our names of the methods that kvpress has to their `FORMS`. Then come turns, {"method", "ratio"} and a
`Workload`'s fields, each answered by a turn's fields, or by {"error"} if memory ran out.
"""

import gc
import json
import os
import sys
from contextlib import nullcontext, suppress
from importlib.metadata import version
from typing import Any

import kvpress
import torch
from standalone import decode, load, prompt_ids, read_prompt
from transformers import DynamicCache, PreTrainedModel

# Our name -> kvpress's press, with its own defaults; `removed` is the fraction that kvpress drops. `full` is kvpress's
# transformers without a press: it shows how much of a difference comes from the version of transformers.
PRESSES = {
    "full": lambda removed: lambda model: nullcontext(),
    "adakv": lambda removed: kvpress.AdaKVPress(kvpress.SnapKVPress(removed)),
    "expected-attention": kvpress.ExpectedAttentionPress,
    "h2o": kvpress.ObservedAttentionPress,
    "keydiff": kvpress.KeyDiffPress,
    "knorm": kvpress.KnormPress,
    "lagkv": kvpress.LagKVPress,
    "pyramidkv": kvpress.PyramidKVPress,
    "random": kvpress.RandomPress,
    "snapkv": kvpress.SnapKVPress,
    "streamingllm": kvpress.StreamingLLMPress,
    "tova": kvpress.TOVAPress,
}
# The options with which our methods choose the same entries, where they are not our defaults.
FORMS = {
    "adakv": {"variant": "kvpress", "window_size": 64, "kernel_size": 5, "pooling": "avg"},
    "lagkv": {"sinks": 4, "lag": 128},
    "pyramidkv": {"variant": "kvpress", "window_size": 64},
    "snapkv": {"window_size": 64},
    "tova": {"variant": "kvpress"},
}


def turn(model: PreTrainedModel, order: dict[str, Any]) -> dict[str, Any]:
    """Run one prompt and its answer as kvpress's own pipeline does, with the press active only for the prompt."""
    device, length, clock = model.device, order["length"], order["clock"]
    ids = prompt_ids(model, 1 if order["one_prompt"] else order["batch"], length)
    press = PRESSES[order["method"]](1 - (order["ratio"] or 1))
    base = model.config._attn_implementation
    if isinstance(press, kvpress.ObservedAttentionPress):
        model.config._attn_implementation = "eager"  # it needs the attention weights
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for module in model.modules():
        module.masked_key_indices = None  # with eager attention kvpress would reuse the previous press's
    cache = DynamicCache()
    try:
        with press(model):
            token, prompt_ms = read_prompt(model, cache, ids, clock)
    finally:
        model.config._attn_implementation = base
    if order["one_prompt"]:
        repeat(model, cache, order["batch"])
        token = token.repeat(order["batch"], 1)
    step_ms = decode(model, cache, token, length, order["steps"], clock)
    held = sum(states.untyped_storage().nbytes() for layer in cache.layers for states in (layer.keys, layer.values))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"prompt_ms": prompt_ms, "step_ms": step_ms, "kv_bytes": held, "peak_bytes": peak}


def repeat(model: PreTrainedModel, cache: DynamicCache, batch: int) -> None:
    """Repeat the cache's row `batch` times, and also the entries that kvpress masks instead of dropping."""
    cache.batch_repeat_interleave(batch)
    for module in model.modules():
        if module.masked_key_indices is not None:
            _, heads, columns = module.masked_key_indices
            rows = torch.arange(batch).repeat_interleave(len(heads))
            module.masked_key_indices = (rows, heads.repeat(batch), columns.repeat(batch))


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep what libraries print out of the replies

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    hello = json.loads(sys.stdin.readline())
    torch.set_num_threads(hello["threads"])
    model = load(hello["source"], hello["dtype"], torch.device(hello["device"]))
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    reply({"presses": {name: FORMS.get(name, {}) for name in PRESSES}, "versions": versions})
    for line in sys.stdin:
        answer = {"error": "out of memory"}
        with suppress(torch.OutOfMemoryError):
            answer = turn(model, json.loads(line))
        if "error" in answer:
            gc.collect()
            torch.cuda.empty_cache()
        reply(answer)


if __name__ == "__main__":
    main()
