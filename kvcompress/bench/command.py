"""`kvcompress bench`: measure the costs and savings of compression compared with other caches.

`kvcompress bench throughput`: many requests with answers of different lengths, at equal KV memory.
`kvcompress bench launches`: kernels, bytes and waits on a CUDA device, counted with or without one.
"""

import argparse
import os
from pathlib import Path

from ..command_line import Parser
from ..flag_types import fraction, label, positive, whole
from .flags import SPEC, add_flags

# What `bench launches` counts by default: one method of each kind of eviction, and every storage without a package of
# its own.
EVICTING = ":decode_budget=64:decode_interval=4"
PACKED = ":cache_implementation=quantized:kv_backend=turboquant"
FP8 = ":cache_implementation=quantized:kv_backend=fp8"
STORAGES = (":cache_implementation=offloaded", ":cache_implementation=offloaded_static", ":cache_implementation=think")
LAUNCHED = (
    *("full", "snapkv", "h2o", "adakv", "full:cache_implementation=static", "snapkv:cache_implementation=static"),
    *(f"{name}{EVICTING}" for name in ("streamingllm", "h2o", "r-kv", "adakv")),
    *(f"{name}{storage}" for storage in (*STORAGES, PACKED, FP8) for name in ("snapkv", "adakv")),
)


def parser() -> argparse.ArgumentParser:
    this = Parser(
        "bench",
        description="Measure the costs and savings of compression compared with transformers' caches and kvpress.",
    )
    add = this.add_argument
    add_flags(this, "model", "--shape", "--device", "--dtype", "--threads", "--clock", "--minutes", "--resume")
    add_flags(this, methods=["snapkv", "adakv"], lengths=[2048], new=32, repeats=5, out=Path("bench"))
    add("--ratios", nargs="+", type=fraction, default=[0.1], help="shares of the prompt that are kept (0.1)")
    add("--batches", nargs="+", type=whole(1), default=[1], help="prompts at a time (1)")
    add("--one-prompt", action="store_true", help="read one prompt, repeat its cache: large batches sooner")
    add("--peers", nargs="*", type=label, default=["dynamic"], help="of dynamic, static (dynamic)")
    add("--kvpress-python", type=label, metavar="PATH", help="Python of an environment with kvpress: a peer too")
    add("--compile", action="store_true", help="also compile the decode step of every static cache")
    add("--largest-batch", action="store_true", help="on CUDA: find, by trying, the largest that decodes")
    add("--memory-limit", type=positive, metavar="GB", help="count the largest batch that this would hold")
    return this


def gigabytes(text: str) -> float | None:
    """Parse a positive number, or None for `auto`."""
    return None if text == "auto" else positive(text)


def throughput_parser() -> argparse.ArgumentParser:
    this = Parser(
        "bench throughput",
        description="Answers and tokens per second at equal KV memory: requests in flight with compressed caches, "
        "compared with transformers' padded batches and continuous batching with the full cache.",
    )
    add = this.add_argument
    add_flags(this, "model", "--shape", "--device", "--dtype", "--threads", "--clock", "--minutes", "--resume")
    add_flags(this, out=Path("throughput"))
    methods, peers = ["full", "r-kv", "snapkv", "adakv", "streamingllm"], ["padded", "continuous"]
    add("--methods", nargs="*", type=label, metavar=SPEC, default=methods, help=f"in flight ({' '.join(methods)})")
    budget = "entries per layer and KV head, where a method names none (128)"
    add("--decode-budget", type=whole(1), default=128, help=budget)
    add("--peers", nargs="*", choices=peers, default=peers, help=f"transformers' ways ({' '.join(peers)})")
    add("--paged", nargs="*", type=label, metavar=SPEC, default=[], help="methods in transformers' continuous batching")
    add("--requests", type=whole(1), default=96, help="how many (96)")
    add("--prompt", type=whole(1), default=512, help="tokens of each prompt (512)")
    tokens = "tokens of an answer (64 1024)"
    add("--answers", nargs=2, type=whole(1), default=[64, 1024], metavar=("LEAST", "MOST"), help=tokens)
    add("--seed", type=whole(), default=0, help="of prompts and lengths (0)")
    add("--kv-gb", type=gigabytes, default=0.345, help="GiB for keys and values; auto: 0.8 of free CUDA memory (0.345)")
    add("--static", action="store_true", help="requests in flight in steps of one shape, compiled on CUDA")
    return this


def launches_parser() -> argparse.ArgumentParser:
    this = Parser(
        "bench launches",
        description="Kernels, bytes and waits of a decode step, an eviction and a prefill on a CUDA device, for ours "
        "and transformers' caches. Counted by the profiler, or without a GPU on a pretended device.",
    )
    add = this.add_argument
    add_flags(this, "model", "--shape", methods=list(LAUNCHED), dtype="bfloat16", out=Path("launches"))
    add("--ratio", type=fraction, default=0.2, help="share of the prompt that is kept (0.2)")
    add("--length", type=whole(1), default=512, help="prompt tokens (512)")
    add("--batch", type=whole(1), default=1, help="prompts at a time (1)")
    add("--new", type=whole(5), default=12, help="decode steps that are counted (12)")
    add("--layers", type=whole(1), help="layers of the shape's model (4)")
    add("--lines", type=whole(), default=0, help="also print that many of the most expensive lines of code (0)")
    return this


def main(arguments: list[str]) -> None:
    """Run the benchmark. Raises KVCompressError for wrong arguments, before anything is loaded."""
    if arguments[:1] == ["launches"]:
        given = launches_parser().parse_args(arguments[1:])
        import torch

        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this on import
        from .launches import measure

        measure(given, arguments[1:])
        return
    if arguments[:1] == ["throughput"]:
        given = throughput_parser().parse_args(arguments[1:])
        from .throughput import measure

        measure(given, arguments)
        return
    given = parser().parse_args(arguments)
    from .comparison import measure

    measure(given, arguments)
