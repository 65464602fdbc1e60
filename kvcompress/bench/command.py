"""`kvcompress bench`: measure the costs and savings of compression compared with other caches.

`kvcompress bench throughput`: many requests with answers of different lengths, at equal KV memory.
`kvcompress bench launches`: kernels, bytes and waits on a CUDA device, counted with or without one.
"""

import argparse
import os
from pathlib import Path

from ..command_line import Parser
from ..flag_types import device_name, fraction, label, new_file, positive, threads, whole
from .shapes import SHAPES

# What `bench launches` counts by default: one method of each kind of eviction, and every storage.
EVICTING = ":decode_budget=64:decode_interval=4"
PACKED = ":cache_implementation=quantized:kv_backend=turboquant"
LAUNCHED = (
    *("full", "snapkv", "h2o", "adakv", "full:cache_implementation=static", "snapkv:cache_implementation=static"),
    *(f"{name}{EVICTING}" for name in ("streamingllm", "h2o", "r-kv", "adakv")),
    *("snapkv:cache_implementation=offloaded", f"snapkv{PACKED}", f"adakv{PACKED}"),
)


def parser() -> argparse.ArgumentParser:
    this = Parser(
        "bench",
        description="Measure the costs and savings of compression compared with transformers' caches and kvpress.",
    )
    this.add_argument("model", nargs="?", type=label, help="hub id or local path")
    this.add_argument(
        "--shape", type=label, help=f"instead of a model, random weights in the shape of one: {', '.join(SHAPES)}"
    )
    this.add_argument("--methods", nargs="+", type=label, default=["snapkv", "adakv"], metavar="NAME[:OPTION=VALUE...]")
    this.add_argument("--ratios", nargs="+", type=fraction, default=[0.1])
    this.add_argument("--lengths", nargs="+", type=whole(1), default=[2048], help="prompt tokens")
    this.add_argument("--batches", nargs="+", type=whole(1), default=[1])
    this.add_argument("--new", type=whole(1), default=32, help="decode steps per answer")
    this.add_argument(
        "--one-prompt", action="store_true", help="prefill one prompt and repeat its cache: faster for large batches"
    )
    this.add_argument("--repeats", type=whole(1), default=5)
    this.add_argument("--peers", nargs="*", type=label, default=["dynamic"], help="dynamic, static")
    this.add_argument(
        "--kvpress-python", type=label, metavar="PATH", help="Python of an environment with kvpress, to compare with it"
    )
    this.add_argument("--compile", action="store_true", help="also compile the decode step of every static cache")
    this.add_argument("--device", type=device_name, help="default: cuda if available")
    this.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default=None, help="default: bfloat16 on CUDA"
    )
    this.add_argument("--threads", type=threads, help="CPU threads (default: torch's own)")
    this.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: the process's CPU time")
    this.add_argument("--largest-batch", action="store_true", help="on CUDA: find the largest batch that decodes")
    this.add_argument(
        "--memory-limit", type=positive, metavar="GB", help="compute the largest batch that fits into this"
    )
    this.add_argument("--minutes", type=positive, default=float("inf"), help="start no further cell after this time")
    this.add_argument("--out", type=new_file, default=Path("bench"), help="without a suffix: .json, .md and .png")
    this.add_argument("--resume", action="store_true", help="keep the cells that are already in the .json")
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
    this.add_argument("model", nargs="?", type=label, help="hub id or local path")
    this.add_argument(
        "--shape", type=label, help=f"instead of a model, random weights in the shape of one: {', '.join(SHAPES)}"
    )
    this.add_argument(
        "--methods",
        nargs="*",
        type=label,
        metavar="NAME[:OPTION=VALUE...]",
        default=["full", "r-kv", "snapkv", "adakv", "streamingllm"],
    )
    this.add_argument(
        "--decode-budget",
        type=whole(1),
        default=128,
        help="entries per layer and KV head, unless a method sets its own",
    )
    this.add_argument("--peers", nargs="*", choices=["padded", "continuous"], default=["padded", "continuous"])
    this.add_argument(
        "--paged",
        nargs="*",
        type=label,
        metavar="NAME[:OPTION=VALUE...]",
        default=[],
        help="methods to run inside transformers' continuous batching",
    )
    this.add_argument("--requests", type=whole(1), default=96)
    this.add_argument("--prompt", type=whole(1), default=512, help="tokens of each prompt")
    this.add_argument(
        "--answers",
        nargs=2,
        type=whole(1),
        default=[64, 1024],
        metavar=("LEAST", "MOST"),
        help="tokens of an answer",
    )
    this.add_argument("--seed", type=whole(), default=0)
    this.add_argument(
        "--kv-gb", type=gigabytes, default=0.345, help="GiB for keys and values; on CUDA, auto: 0.8 of the free memory"
    )
    this.add_argument("--static", action="store_true", help="decode in steps of fixed shape, compiled on CUDA")
    this.add_argument("--minutes", type=positive, default=float("inf"), help="each contender stops after this time")
    this.add_argument("--device", type=device_name, help="default: cuda if available")
    this.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default=None, help="default: bfloat16 on CUDA"
    )
    this.add_argument("--threads", type=threads, help="CPU threads (default: torch's own)")
    this.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: the process's CPU time")
    this.add_argument("--out", type=new_file, default=Path("throughput"), help="without a suffix: .json and .md")
    this.add_argument("--resume", action="store_true", help="keep the contenders that are already in the .json")
    return this


def launches_parser() -> argparse.ArgumentParser:
    this = Parser(
        "bench launches",
        description="Kernels, bytes and waits of a decode step, an eviction and a prefill on a CUDA device, for ours "
        "and transformers' caches. Counted by the profiler, or without a GPU on a pretended device.",
    )
    this.add_argument("model", nargs="?", type=label, help="hub id or local path")
    this.add_argument(
        "--shape", type=label, help=f"instead of a model, four layers in the shape of one: {', '.join(SHAPES)}"
    )
    this.add_argument("--methods", nargs="+", type=label, metavar="NAME[:OPTION=VALUE...]", default=list(LAUNCHED))
    this.add_argument("--ratio", type=fraction, default=0.2)
    this.add_argument("--length", type=whole(1), default=512, help="prompt tokens")
    this.add_argument("--batch", type=whole(1), default=1)
    this.add_argument("--new", type=whole(5), default=12, help="decode steps to count")
    this.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    this.add_argument(
        "--lines", type=whole(), default=0, help="also print this many of the most expensive lines of code"
    )
    this.add_argument("--out", type=new_file, default=Path("launches"), help="without a suffix: .json, .md")
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
