"""Measure the memory of a long prefill, in one piece and in chunks.

    python -m benchmarks.prefill_memory                                  # CPU, fp32

A model with the shape of Qwen2-0.5B, few layers and random weights reads prompts of 8k to 32k tokens: with the full
cache, with a compressed one, and with one that is compressed after each chunk. Each runs in a process of its own.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import kvcompress
from kvcompress.bench.shapes import SHAPES
from kvcompress.bench.standalone import load, prompt_ids
from kvcompress.bench.timing import table
from kvcompress.cache.scope import States
from kvcompress.device import peak_memory, reset_peak_memory
from kvcompress.flag_types import label, whole
from kvcompress.measure import LargestTensor

from .driver import FOLDER, Run, new_parser, start

WAYS = {
    "full cache": {"method": "full"},
    "snapkv": {"method": "snapkv"},
    "snapkv, in chunks": {"method": "snapkv", "prefill_chunk": True},
}


class PeakKV:
    """Tracks the peak bytes of all keys and values that the cache holds or has staged, checked after each attention."""

    def __init__(self, cache: kvcompress.CompressedCache):
        self.cache, self.nbytes = cache, 0

    def __enter__(self) -> "PeakKV":
        self._layers = [layer.listen(self._listen) for layer in self.cache.compressed_layers]
        return self

    def __exit__(self, *exception: object) -> None:
        for listening in self._layers:
            listening.remove()

    def _listen(self, states: States, compress: Callable[[], None]) -> None:
        self.nbytes = max(self.nbytes, self.cache.nbytes + states.keys.nbytes + states.values.nbytes)
        compress()


@torch.no_grad()
def measured(way: str, tokens: int, layers: int, budget: int, chunk: int) -> dict:
    """Run one prefill in this process."""
    device = torch.device("cpu")
    model = load({"config": {**SHAPES["qwen2-0.5b"], "num_hidden_layers": layers}}, "float32", device)
    options = dict(WAYS[way])
    if options["method"] != "full":
        options["budget"] = budget
    if options.get("prefill_chunk"):
        options["prefill_chunk"] = chunk
    cache = kvcompress.CompressedCache(model.config, **options)
    reset_peak_memory(device)
    before = resident()
    with kvcompress.attach(model), PeakKV(cache) as peak, LargestTensor(model) as largest:
        model(prompt_ids(model, 1, tokens), past_key_values=cache, logits_to_keep=1)
    return {
        "way": way,
        "tokens": tokens,
        "kv_peak_bytes": max(peak.nbytes, cache.nbytes),
        "kv_held_bytes": cache.nbytes,
        "process_peak_bytes": peak_memory(device) - before,
        "largest_tensor": largest.numel,
    }


def resident() -> int:
    """Return the bytes that this process has in memory now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def apart(argv: list[str], how: dict[str, int], way: str, tokens: int) -> list[dict]:
    """Run one prefill in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.prefill_memory", *argv, "--only", way, str(tokens)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [{**how, **json.loads(result.stdout.splitlines()[-1])}]


def memory_table(records: list[dict]) -> str:
    rows = [
        [record["tokens"], record["way"]]
        + [f"{record[name] / 1e6:.1f}" for name in ("kv_peak_bytes", "kv_held_bytes", "process_peak_bytes")]
        + [f"{record['largest_tensor'] / 1e6:.1f}", f"{record['largest_tensor'] / record['tokens'] ** 2:.4f}"]
        for record in sorted(records, key=lambda record: (record["tokens"], list(WAYS).index(record["way"])))
    ]
    header = ["tokens", "cache", "KV at its peak, MB", "KV held, MB", "process, MB", "largest tensor, M", "of tokens²"]
    return table(header, rows)


def main(argv: list[str]) -> None:
    files = {"lengths": [8192, 16384, 32768], "out": FOLDER / "prefill_memory"}
    parser = new_parser("prefill_memory", __doc__, "--threads", "--resume", **files)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--layers", type=whole(1), default=4)
    parser.add_argument("--budget", type=whole(1), default=1024)
    parser.add_argument("--chunk", type=whole(1), default=1024)
    parser.add_argument("--only", nargs=2, type=label, help=argparse.SUPPRESS)  # in a process of its own: WAY TOKENS
    parser.set_defaults(device="cpu")
    run = Run(parser, argv, grid=("lengths", "ways", "only"))
    given = run.given
    how = {"layers": given.layers, "budget": given.budget, "chunk": given.chunk}
    if given.only:
        print(json.dumps(measured(given.only[0], int(given.only[1]), **how)))
        return
    cells = [{"way": way, "tokens": tokens} for tokens in given.lengths for way in given.ways]
    run.measure(cells, partial(apart, argv, how))
    run.report(
        "Memory of a long prefill",
        f"A model of Qwen2-0.5B's shape with {given.layers} layers and random weights, fp32, one prompt; a budget of "
        f"{given.budget} entries per layer and KV head, chunks of {given.chunk} tokens "
        f"(`prefill_chunk={given.chunk}`). KV at its peak: keys and values that the cache holds or has staged, the "
        "most at any attention. Process: the most resident memory in the pass beyond what the loaded model takes. "
        "Largest tensor: the most elements (millions) that any operation returned, and the same as a part of tokens x "
        "tokens.",
        memory_table(run.records),
    )


if __name__ == "__main__":
    start(main)
