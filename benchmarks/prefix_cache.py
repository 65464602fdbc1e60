"""Measure answers per second to many questions about one picture, with and without a prefix cache.

    python -m benchmarks.prefix_cache --threads 1 --clock cpu            # CPU, fp32
    python -m benchmarks.prefix_cache --device cuda --dtype bfloat16
    python -m benchmarks.prefix_cache --threads 1 --clock cpu --scope context-first --methods snapkv \
        --alone 2 --out benchmarks/results/prefix_cache_context_first

A model of a known shape with random weights answers several questions. Their prompts begin with the same tokens, as
many as a picture has. Alone, each prompt is prefilled as a whole; with the cache, only the first one is. Each method
answers the questions in turns, alone, with its own cache, and with a cache shared by all methods. Then it answers
prompts that share nothing, without a cache and with one that fills up.
"""

import argparse
from statistics import median

import torch
from transformers import PreTrainedModel

import kvcompress
from kvcompress import KVCompressError, PrefixCache
from kvcompress.bench.shapes import SHAPES
from kvcompress.bench.standalone import CLOCKS, load, synchronise
from kvcompress.bench.timing import table
from kvcompress.flag_types import fraction, positive, whole

from .driver import Run, speed_parser, start

METHODS = ("full", "snapkv", "h2o", "adakv", "expected-attention")


class PrefixBench:
    """Times one model on prompts with a common prefix."""

    def __init__(self, model: PreTrainedModel, arguments: argparse.Namespace):
        self.model, self.asked = model, arguments
        self.beginnings = 0

    def prompts(self) -> list[torch.Tensor]:
        """Draw one prompt per question, all about a new picture."""
        self.beginnings += 1
        generator = torch.Generator().manual_seed(self.beginnings)
        vocabulary, asked = self.model.config.vocab_size, self.asked
        picture = torch.randint(vocabulary, (1, asked.picture), generator=generator)
        ends = torch.randint(vocabulary, (asked.questions, asked.question), generator=generator)
        return [torch.cat([picture, end[None]], dim=1).to(self.model.device) for end in ends]

    def answer(self, method: str, ids: torch.Tensor, prefixes: PrefixCache | None) -> tuple[torch.Tensor, float]:
        """Return the new tokens and the seconds that they took."""
        clock, ratio = CLOCKS[self.asked.clock], None if method == "full" else self.asked.ratio
        mask = torch.ones_like(ids)
        synchronise(ids.device)
        start = clock()
        options = {"scope": self.asked.scope, "context_tokens": self.asked.picture}
        options = {} if self.asked.scope == "prompt" else options
        with kvcompress.compress(self.model, method, ratio, prefix_cache=prefixes, **options):
            tokens = self.model.generate(ids, attention_mask=mask, max_new_tokens=self.asked.new, do_sample=False)
        synchronise(ids.device)
        return tokens[:, ids.shape[1] :], clock() - start


def compare(bench: PrefixBench, methods: list[str]) -> list[dict]:
    """Time each question with each method, alone and with both caches in turns."""
    asked, prompts = bench.asked, bench.prompts()
    for method in methods:  # a warm-up
        bench.answer(method, bench.prompts()[0], PrefixCache(gb=asked.gb))
    together, records = PrefixCache(gb=asked.gb), []
    for method in methods:
        own = PrefixCache(gb=asked.gb)
        record = {"method": method, "alone": [], "own": [], "together": []}
        for i, ids in enumerate(prompts):
            expected = None
            if i < asked.alone:
                expected, seconds = bench.answer(method, ids, None)
                record["alone"].append(seconds)
            for name, prefixes in (("own", own), ("together", together)):
                tokens, seconds = bench.answer(method, ids, prefixes)
                record[name].append(seconds)
                if expected is not None and not torch.equal(tokens, expected):
                    raise AssertionError(f"{method}, question {i}: {tokens.tolist()} is not {expected.tolist()}")
        record["unshared"] = unshared(bench, method)
        record |= {"nbytes": own.nbytes, "reused": own.reused_tokens, "prompt_tokens": own.prompt_tokens}
        records.append(record)
    return records


def unshared(bench: PrefixBench, method: str) -> list[float]:
    """Return the speed with a prefix cache as a share of that without one, for prompts with nothing in common."""
    prefixes, shares = PrefixCache(gb=bench.asked.gb), []
    for turn in range(bench.asked.alone):
        ids, seconds = bench.prompts()[0], {}
        for given in (None, prefixes)[:: 1 if turn % 2 else -1]:
            seconds[given] = bench.answer(method, ids, given)[1]
        shares.append(seconds[None] / seconds[prefixes])
    return shares


def times_as_many(record: dict, name: str, questions: int) -> float:
    """Return the speed-up over questions asked alone, for the first `questions` questions."""
    return questions * median(record["alone"]) / sum(record[name][:questions])


def report(records: list[dict], asked: argparse.Namespace) -> str:
    counts = [n for n in (1, 2, 3, 6, 18) if n <= asked.questions]
    rows = [
        [record["method"], f"{median(record['alone']):.3f}", f"{record['own'][0]:.3f}"]
        + [f"{median(record['own'][1:]):.3f}"]
        + [f"{times_as_many(record, 'own', n):.2f}" for n in counts]
        + [f"{median(record['unshared']):.2f}", f"{record['nbytes'] / 1e6:.1f}"]
        for record in records
    ]
    header = ["method", "alone, s", "first, s", "later, s", *(f"x, {n} of a picture" for n in counts)]
    header += ["x, nothing shared", "held, MB"]
    alone = sum(asked.questions * median(record["alone"]) for record in records)
    grid = alone / sum(sum(record["together"]) for record in records)
    return (
        f"Seconds ({asked.clock} clock, {asked.threads} threads) of one answer of {asked.new} tokens to a prompt of "
        f"{asked.picture} tokens that all questions share and {asked.question} of its own, {asked.dtype}; "
        f"{asked.shape}'s shape, random weights, without a vision tower; scope={asked.scope}, a ratio of "
        f"{asked.ratio:g}. Alone: the "
        f"median of {asked.alone} questions. With a prefix cache: the first question, and the median of the later "
        "ones, then answers per second over those alone, where a picture has so many questions, and where prompts "
        f"share nothing (the median of {asked.alone}). Held: the cache's bytes after the questions. Where both were "
        "asked, tokens were the same.\n\n"
        + table(header, rows)
        + f"\nAll {len(records)} methods with one prefix cache, {asked.questions} questions each: "
        f"{grid:.1f} times as many answers per second as alone."
    )


@torch.no_grad()
def main(argv: list[str]) -> None:
    parser = speed_parser("prefix_cache", __doc__, methods=list(METHODS), new=4)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-0.5b")
    parser.add_argument("--ratio", type=fraction, default=0.2)
    parser.add_argument("--scope", choices=["prompt", "context-first"], default="prompt", help="of the compression")
    parser.add_argument("--picture", type=whole(1), default=1500, help="tokens that prompts share (1500)")
    parser.add_argument("--question", type=whole(1), default=30, help="tokens of each prompt's own (30)")
    parser.add_argument("--questions", type=whole(2), default=18, help="of one picture (18)")
    parser.add_argument("--alone", type=whole(1), default=4, help="of these, how many are also asked alone (4)")
    parser.add_argument("--gb", type=positive, default=4.0, help="of the prefix cache (4.0)")
    run = Run(parser, argv)
    asked = run.given
    if asked.alone > asked.questions:
        raise KVCompressError(f"--alone {asked.alone}: more than there are, --questions {asked.questions}")
    torch.manual_seed(0)
    model = load({"config": SHAPES[asked.shape]}, asked.dtype, run.device)
    run.measure([{}], lambda: compare(PrefixBench(model, asked), asked.methods))
    run.report("Many questions about one picture", report(run.records, asked))


if __name__ == "__main__":
    start(main)
