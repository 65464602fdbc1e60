"""Measure the memory of a long prefill, in one piece and in chunks.

    python -m benchmarks.prefill_memory                                  # CPU, fp32

A model with Qwen2-0.5B's shape, few layers and random weights reads prompts of 8k to 32k tokens: with the full cache,
with a compressed one, and with one that is compressed after each chunk. Each runs in its own process; existing results
are not measured again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import kvcompress
from kvcompress.bench.models import SHAPES
from kvcompress.bench.standalone import load, prompt_ids
from kvcompress.bench.timing import table, write
from kvcompress.cache.scope import States
from kvcompress.check.promises import LargestTensor
from kvcompress.device import peak_memory, reset_peak_memory

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
def measured(way: str, tokens: int, layers: int, budget: int, chunk: int, threads: int) -> dict:
    """Measure one prefill in this process."""
    torch.set_num_threads(threads)
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


def report(records: list[dict], layers: int, budget: int, chunk: int) -> str:
    rows = [
        [record["tokens"], record["way"]]
        + [f"{record[name] / 1e6:.1f}" for name in ("kv_peak_bytes", "kv_held_bytes", "process_peak_bytes")]
        + [f"{record['largest_tensor'] / 1e6:.1f}", f"{record['largest_tensor'] / record['tokens'] ** 2:.4f}"]
        for record in records
    ]
    header = ["tokens", "cache", "KV at its peak, MB", "KV held, MB", "process, MB", "largest tensor, M", "of tokens²"]
    return (
        "# Memory of a long prefill\n\n"
        f"A model of Qwen2-0.5B's shape with {layers} layers and random weights, fp32, one prompt; a budget of "
        f"{budget} entries per layer and KV head, chunks of {chunk} tokens (`prefill_chunk={chunk}`). KV at its peak: "
        "keys and values that the cache holds or has staged, the most at any attention. Process: the most resident "
        "memory in the pass beyond what the loaded model takes. Largest tensor: the most elements (millions) that any "
        "operation returned, and the same as a part of tokens x tokens.\n\n" + table(header, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prefill_memory"), help="without a suffix")
    parser.add_argument("--only", nargs=2, metavar=("WAY", "TOKENS"), help=argparse.SUPPRESS)  # for the child processes
    arguments = parser.parse_args()
    how = (arguments.layers, arguments.budget, arguments.chunk)
    if arguments.only:
        way, tokens = arguments.only
        print(json.dumps(measured(way, int(tokens), *how, arguments.threads)))
        return
    settings = dict(zip(("layers", "budget", "chunk"), how, strict=True))
    records = known(arguments.out, settings)
    for tokens in arguments.lengths:
        for way in arguments.ways:
            if any((record["way"], record["tokens"]) == (way, tokens) for record in records):
                continue
            command = [sys.executable, "-m", "benchmarks.prefill_memory", *sys.argv[1:], "--only", way, str(tokens)]
            result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            records.append({**settings, **json.loads(result.stdout.splitlines()[-1])})
            records.sort(key=lambda record: (record["tokens"], list(WAYS).index(record["way"])))
            write(arguments.out, report(records, *how), records, torch.device("cpu"))


def known(out: Path, settings: dict[str, int]) -> list[dict]:
    """Return the records of earlier runs with these settings, whether interrupted or for other ways and lengths."""
    file = out.with_suffix(".json")
    records = json.loads(file.read_text())["records"] if file.exists() else []
    return [record for record in records if settings.items() <= record.items()]


if __name__ == "__main__":
    main()
