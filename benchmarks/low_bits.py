"""Time a decode step over packed entries of several rows against one over entries in full precision.

    python -m benchmarks.low_bits --threads 1 --clock cpu                # CPU, fp32
    python -m benchmarks.low_bits --device cuda --dtype bfloat16 --batch 32

A model of a known shape with random weights reads one prompt per storage; every row of the batch goes on from a copy of
its cache, and the storages take turns at one token each.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch

import kvcompress
from kvcompress.bench.shapes import SHAPES
from kvcompress.bench.standalone import load
from kvcompress.bench.timing import cell, interleaved, table
from kvcompress.flag_types import whole

from .driver import Run, speed_parser, start

BACKENDS = ("turboquant", "quanto", "hqq")


def storages(bits: int) -> dict[str, dict]:
    packed = {"cache_implementation": "quantized", "kv_bits": bits}
    return {
        "full precision": {},
        **{f"{backend}, {bits} bits": packed | {"kv_backend": backend} for backend in BACKENDS},
    }


@torch.no_grad()
def measured(asked: argparse.Namespace, device: torch.device, entries: int) -> Iterator[dict]:
    """Time one decode step with each storage."""
    torch.manual_seed(0)
    model = load({"config": SHAPES[asked.shape]}, asked.dtype, device)
    ids = torch.randint(model.config.vocab_size, (1, entries), device=device)
    token = ids[:, :1].expand(asked.batch, 1)
    steps: dict[str, Callable[[], object]] = {}
    nbytes = {}
    for name, options in storages(asked.bits).items():
        cache = kvcompress.CompressedCache(model.config, "full", **options)
        with kvcompress.attach(model):
            model(ids, past_key_values=cache, logits_to_keep=1)
        nbytes[name] = cache.nbytes
        cache.batch_repeat_interleave(asked.batch)
        steps[name] = partial(model, token, past_key_values=cache, logits_to_keep=1)
    with kvcompress.attach(model):
        taken = interleaved(steps, asked.repeats, device, asked.clock)
    yield from ({"entries": entries, "storage": name, "nbytes": nbytes[name], **taken[name]} for name in steps)


def report(records: list[dict], asked: argparse.Namespace) -> str:
    whole_ones = {record["entries"]: record for record in records if record["storage"] == "full precision"}
    rows = []
    for record in records:
        against = whole_ones[record["entries"]]
        held = f"{asked.batch * record['nbytes'] / 1e6:.1f}"
        gain = f"{against['median'] / record['median']:.2f}"
        rows.append([record["entries"], record["storage"], held, cell(record), gain])
    return (
        f"Milliseconds ({asked.clock} clock) of one decode step of {asked.batch} rows, median (quartiles) of "
        f"{asked.repeats} turns, {asked.dtype}; {asked.shape}'s shape, random weights, `full`.\n\n"
        + table(["entries per row", "storage", "MB", "ms", "times as fast"], rows)
    )


def main(argv: list[str]) -> None:
    parser = speed_parser("low_bits", __doc__, lengths=[4096], repeats=10)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--batch", type=whole(1), default=8, help="rows (8)")
    parser.add_argument("--bits", type=int, choices=(2, 4), default=4, help="per number (4)")
    run = Run(parser, argv, grid=("lengths",))
    run.measure([{"entries": length} for length in run.given.lengths], partial(measured, run.given, run.device))
    run.report("A decode step over packed entries", report(run.records, run.given))


if __name__ == "__main__":
    start(main)
