"""Time decoding with fixed shapes and one compiled graph against growing buffers, in milliseconds per token.

    python -m benchmarks.static_decode                                   # CPU, fp32
    python -m benchmarks.static_decode --device cuda --dtype bfloat16 --layers 24 --prompt 4096

A model of Qwen2-0.5B's width with random weights answers one prompt through `generate`, which compiles the decode step:
on CUDA by default, on a CPU because we request it. Every way must give the tokens of the dynamic cache.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, StoppingCriteria

import kvcompress
from kvcompress.bench.contenders import compile_config
from kvcompress.bench.standalone import CLOCKS, synchronise
from kvcompress.bench.timing import cell, environment, summary, table, write

METHODS = {"full": None, "snapkv": 0.1, "adakv": 0.1}
WARM_UP = 4  # tokens of each answer; the first compiles
SHORTER = 16  # tokens by which each prompt is shorter than the previous, since an evaluation's prompts differ


class Clock(StoppingCriteria):
    """Records when each new token is ready; never stops the generation."""

    def __init__(self, clock: str):
        self.clock = CLOCKS[clock]
        self.times: list[float] = []
        self.wall: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        synchronise(input_ids.device)
        self.times.append(self.clock())
        self.wall.append(CLOCKS["wall"]())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def answer(
    model: Qwen2ForCausalLM, ids: torch.Tensor, new: int, clock: str, method: str, kind: str, compiled: bool
) -> tuple[torch.Tensor, Clock, int]:
    """Return the new tokens, the clock with the time of each, and the cache's bytes."""
    cache = kvcompress.CompressedCache(
        model.config, method, METHODS[method], max_new_tokens=new, cache_implementation=kind
    )
    how = {"compile_config": compile_config(ids.device)} if compiled else {"disable_compile": True}
    ticks = Clock(clock)
    with kvcompress.attach(model):
        tokens = model.generate(
            ids,
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            stopping_criteria=[ticks],
            **how,
        )
    return tokens[:, ids.shape[1] :], ticks, cache.nbytes


def compare(model: Qwen2ForCausalLM, ids: torch.Tensor, new: int, rounds: int, clock: str) -> list[dict]:
    """Return the milliseconds per token of each method and way; the ways take turns, one answer each."""
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
                tokens, ticks, nbytes[name] = answer(model, prompt, new, clock, method, kind, compiled)
                expected = tokens if expected is None else expected
                if not torch.equal(tokens, expected):
                    raise AssertionError(f"{method}, {name}: {tokens.tolist()} is not {expected.tolist()}")
                first[name].append(ticks.wall[WARM_UP] - ticks.wall[0])
                taken[name] += [1e3 * (end - start) for start, end in pairwise(ticks.times[WARM_UP:])]
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        summaries = {name: summary(milliseconds) for name, milliseconds in taken.items()}
        records.append({"method": method, "ms": summaries, "first_s": first, "nbytes": nbytes, "graphs": graphs})
    return records


def report(records: list[dict], arguments: argparse.Namespace) -> str:
    rows = [
        [record["method"], f"{record['nbytes']['dynamic'] / 1e6:.1f}"]
        + [cell(taken) for taken in record["ms"].values()]
        + [f"{record['ms']['static, compiled']['median'] / record['ms']['dynamic']['median']:.2f}"]
        + [" ".join(f"{seconds:.1f}" for seconds in record["first_s"]["static, compiled"])]
        + [record["graphs"]]
        for record in records
    ]
    header = ["method", "MB", *records[0]["ms"], "compiled / dynamic", "first tokens of each answer, s", "graphs"]
    return (
        "# Static against dynamic decoding\n\n"
        f"Milliseconds per token ({arguments.clock} clock), median (quartiles), of {arguments.rounds} answers of "
        f"{arguments.new} tokens to prompts of {arguments.prompt} tokens and fewer, batch {arguments.batch}, "
        f"{arguments.dtype} on {environment(arguments.device)['device']}; a model with random weights, "
        f"{arguments.layers} layers of "
        f"Qwen2-0.5B's width. snapkv and adakv keep 0.1. The first {WARM_UP} further tokens of an answer, in which the "
        "step is compiled, are not in the medians; the compiled way took the given seconds for them in each answer. "
        "Every way gave the same tokens.\n\n" + table(header, rows)
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/static_decode"), help="without a suffix")
    arguments = parser.parse_args()
    if arguments.new <= WARM_UP + 1:
        parser.error(f"--new {arguments.new}: the first {WARM_UP} tokens warm up; give more than {WARM_UP + 1}")
    torch.set_num_threads(arguments.threads)
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=arguments.layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = Qwen2ForCausalLM._from_config(config, dtype=getattr(torch, arguments.dtype)).eval()
    ids = torch.randint(0, config.vocab_size, (arguments.batch, arguments.prompt), device=arguments.device)
    records = compare(model, ids, arguments.new, arguments.rounds, arguments.clock)
    write(arguments.out, report(records, arguments), records, arguments.device)


if __name__ == "__main__":
    main()
