"""Time the prefill's kernels against plain implementations: column sums of the attention, and moving the kept rows.

    python -m benchmarks.kernels --threads 1 --clock cpu                 # CPU, fp32
    python -m benchmarks.kernels --device cuda --dtype bfloat16 --lengths 2048 8192 32768

One layer with the heads of two models, batch 1. Every implementation available on this machine is checked against the
plain one and then timed in turns. For the column sums, the layer's own attention (sdpa, causal) is timed too: it reads
the same queries and keys, and its share of the prefill grows in the same way.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcompress.bench.timing import cell, interleaved, table
from kvcompress.device import runs_triton
from kvcompress.kernels.column_sums import column_sums_blocked
from kvcompress.kernels.compact import compact, compact_reference
from kvcompress.scoring.windows import attention_blocks

from .driver import Run, speed_parser, start

MODELS = {"SmolLM2-135M": (9, 3, 64), "Qwen2-7B": (28, 4, 128)}  # heads, KV heads, head_dim
RATIOS = (0.1, 0.5)
Ways = dict[str, Callable[[], object]]


def prompt(heads: int, kv_heads: int, head_dim: int, length: int, **kind) -> tuple[torch.Tensor, ...]:
    """Draw queries, keys and values of one row, in the memory layout of a model's projections."""
    parts = (torch.randn(1, length, n, head_dim, **kind).transpose(1, 2) for n in (heads, kv_heads, kv_heads))
    return tuple(parts)


def batched_sums(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute column sums with `attention_blocks`: all heads at once, 128 queries at a time."""
    sums = torch.zeros(keys.shape[:3], device=keys.device)
    for rows, weights in attention_blocks(queries, keys, scaling):
        sums[..., : rows.stop] += weights.sum(3).mean(2)
    return sums


def ways_to_sum(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Ways:
    """Return name -> function that computes column sums (batch, kv_heads, columns); `attention`: the layer's own."""
    scaling = keys.shape[3] ** -0.5
    attend = partial(scaled_dot_product_attention, is_causal=True, scale=scaling, enable_gqa=True)
    ways = {
        "attention": lambda: attend(queries, keys, values),
        "all heads at once": lambda: batched_sums(queries, keys, scaling),
        "head by head": lambda: column_sums_blocked(queries, keys, scaling),
    }
    if runs_triton(queries.device):
        from kvcompress.kernels.column_sums_triton import column_sums_triton

        ways["triton"] = lambda: column_sums_triton(queries, keys, scaling)
    return ways


def ways_to_move(keys: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> Ways:
    """Return name -> function that gives the kept keys and values, each (batch, kv_heads, kept, head_dim)."""
    ways = {"gather": lambda: compact_reference(keys, values, indices)}
    if keys.device.type == "cpu":
        ways["row by row"] = lambda: compact(keys, values, indices)
    return ways


def measured(given: argparse.Namespace, model: str, length: int) -> list[dict]:
    """Time one prompt's column sums, and copying its kept rows at each ratio."""
    device, place = torch.device(given.device), {"dtype": given.dtype, "model": model, "length": length}
    how = given.repeats, device, given.clock
    queries, keys, values = prompt(*MODELS[model], length, device=device, dtype=getattr(torch, given.dtype))
    ways = ways_to_sum(queries, keys, values)
    expected = ways["all heads at once"]()
    for name, call in ways.items():
        if name != "attention":
            torch.testing.assert_close(call(), expected, atol=1e-3, rtol=1e-3)
    records = [{"what": "column sums", **place, "ms": interleaved(ways, *how)}]
    for ratio in RATIOS:
        kept = int(ratio * length)
        drawn = torch.rand(*keys.shape[:3], device=device)
        indices = drawn.topk(kept).indices.sort().values
        ways = ways_to_move(keys, values, indices)
        expected = ways["gather"]()
        for call in ways.values():
            torch.testing.assert_close(call(), expected, atol=0, rtol=0)
        records.append({"what": "kept rows", **place, "kept": kept, "ms": interleaved(ways, *how)})
    return records


def sums_table(records: list[dict]) -> str:
    rows = []
    for record in records:
        taken = record["ms"]
        fastest = min(way["median"] for name, way in taken.items() if name != "attention")
        share = f"{fastest / taken['attention']['median']:.2f}"
        rows.append([record["model"], record["length"], *map(cell, taken.values()), share])
    return table(["heads of", "tokens", *records[0]["ms"], "fastest / attention"], rows)


def moves_table(records: list[dict]) -> str:
    rows = [
        [record["model"], record["length"], record["kept"], *map(cell, record["ms"].values())] for record in records
    ]
    return table(["heads of", "tokens", "kept", *records[0]["ms"]], rows)


def main(argv: list[str]) -> None:
    run = Run(speed_parser("kernels", __doc__, lengths=[2048, 8192], repeats=10), argv, grid=("lengths",))
    cells = [{"model": model, "length": length} for model in MODELS for length in run.given.lengths]
    run.measure(cells, partial(measured, run.given))
    run.report(
        "Kernels of the prefill",
        f"One layer, batch 1. Milliseconds ({run.given.clock} clock), median (quartiles), {run.given.dtype}.",
        "## Column sums of the attention",
        "`attention` is the layer's own, which h2o, look-m and the like need besides. The last column: the fastest way "
        "over it.",
        sums_table([record for record in run.records if record["what"] == "column sums"]),
        "## Moving the kept rows",
        moves_table([record for record in run.records if record["what"] == "kept rows"]),
    )


if __name__ == "__main__":
    start(main)
