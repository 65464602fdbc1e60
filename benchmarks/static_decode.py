"""Time decoding with fixed shapes and one compiled graph against growing buffers, in milliseconds per token.

    python -m benchmarks.static_decode                                   # CPU, fp32
    python -m benchmarks.static_decode --device cuda --dtype bfloat16 --layers 24 --prompt 4096

A model of Qwen2-0.5B's width with random weights answers one prompt through `generate`, which compiles the decode step:
on CUDA by default, on a CPU because we request it. Every way must give the tokens of the dynamic cache.
"""

import argparse
from functools import partial
from itertools import pairwise

import torch
from transformers import PreTrainedModel

import kvcompress
from kvcompress.bench.contenders import compile_config
from kvcompress.bench.shapes import SHAPES
from kvcompress.bench.standalone import CLOCKS, load
from kvcompress.bench.timing import cell, summary, table
from kvcompress.flag_types import whole
from kvcompress.measure import TokenTimes

from .driver import Run, speed_parser, start

METHODS = {"full": None, "snapkv": 0.1, "adakv": 0.1}
WARM_UP = 4  # tokens of each answer; the first compiles
SHORTER = 16  # tokens by which each prompt is shorter than the previous, since an evaluation's prompts differ


def answer(
    model: PreTrainedModel, ids: torch.Tensor, new: int, clock: str, method: str, kind: str, compiled: bool
) -> tuple[torch.Tensor, list[float], list[float], int]:
    """Return the new tokens, the time of each by the given clock and on the wall, and the cache's bytes."""
    cache = kvcompress.CompressedCache(
        model.config, method, METHODS[method], max_new_tokens=new, cache_implementation=kind
    )
    how = {"compile_config": compile_config(ids.device)} if compiled else {"disable_compile": True}
    ticks, wall = TokenTimes(CLOCKS[clock]), TokenTimes()
    with kvcompress.attach(model):
        tokens = model.generate(
            ids,
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            stopping_criteria=[ticks, wall],
            **how,
        )
    return tokens[:, ids.shape[1] :], ticks.times, wall.times, cache.nbytes


def compare(model: PreTrainedModel, ids: torch.Tensor, new: int, rounds: int, clock: str) -> list[dict]:
    """Return milliseconds per token of each method and way, which take turns with an answer each."""
    ways = {"dynamic": ("dynamic", False), "static": ("static", False), "static, compiled": ("static", True)}
    records = []
    for method in METHODS:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model.__dict__.pop("_compiled_call", None)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        first: dict[str, list[float]] = {name: [] for name in ways}
        nbytes = {}
        for turn in range(rounds):
            prompt, expected = ids[:, SHORTER * turn :], None
            for name, (kind, compiled) in ways.items():
                tokens, times, wall, nbytes[name] = answer(model, prompt, new, clock, method, kind, compiled)
                expected = tokens if expected is None else expected
                if not torch.equal(tokens, expected):
                    raise AssertionError(f"{method}, {name}: {tokens.tolist()} is not {expected.tolist()}")
                first[name].append(wall[WARM_UP] - wall[0])
                taken[name] += [1e3 * (end - start) for start, end in pairwise(times[WARM_UP:])]
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        summaries = {name: summary(milliseconds) for name, milliseconds in taken.items()}
        records.append({"method": method, "ms": summaries, "first_s": first, "nbytes": nbytes, "graphs": graphs})
    return records


def shown(records: list[dict]) -> str:
    rows = [
        [record["method"], f"{record['nbytes']['dynamic'] / 1e6:.1f}"]
        + [cell(taken) for taken in record["ms"].values()]
        + [f"{record['ms']['static, compiled']['median'] / record['ms']['dynamic']['median']:.2f}"]
        + [" ".join(f"{seconds:.1f}" for seconds in record["first_s"]["static, compiled"])]
        + [record["graphs"]]
        for record in records
    ]
    header = ["method", "MB", *records[0]["ms"], "compiled / dynamic", "first tokens of each answer, s", "graphs"]
    return table(header, rows)


def what(given: argparse.Namespace) -> str:
    return (
        f"Milliseconds per token ({given.clock} clock), median (quartiles), of {given.rounds} answers of {given.new} "
        f"tokens to prompts of {given.prompt} tokens and fewer, batch {given.batch}, {given.dtype}; a model with "
        f"random weights, {given.layers} layers of Qwen2-0.5B's width. snapkv and adakv keep 0.1. The first {WARM_UP} "
        "further tokens of an answer, in which the step is compiled, are not in the medians; the compiled way took the "
        "given seconds for them in each answer. Every way gave the same tokens."
    )


@torch.no_grad()
def main(argv: list[str]) -> None:
    parser = speed_parser("static_decode", __doc__)
    parser.add_argument("--layers", type=whole(1), default=6)
    parser.add_argument("--batch", type=whole(1), default=1)
    parser.add_argument("--prompt", type=whole(1), default=1024)
    parser.add_argument("--new", type=whole(WARM_UP + 2), default=40, help=f"tokens of an answer; {WARM_UP} warm up")
    parser.add_argument("--rounds", type=whole(1), default=3)
    run = Run(parser, argv)
    given = run.given
    shape = {**SHAPES["qwen2-0.5b"], "vocab_size": 32000, "num_hidden_layers": given.layers}
    model = load({"config": shape}, given.dtype, run.device)
    ids = torch.randint(0, shape["vocab_size"], (given.batch, given.prompt), device=run.device)
    run.measure([{}], partial(compare, model, ids, given.new, given.rounds, given.clock))
    run.report("Static against dynamic decoding", what(given), shown(run.records))


if __name__ == "__main__":
    start(main)
