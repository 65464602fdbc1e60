"""Latency of requests in flight: time to first token, and pauses between tokens while other prompts are prefilled.

    python -m benchmarks.latency --threads 1 --clock cpu                 # CPU, fp32
    python -m benchmarks.latency --device cuda --dtype bfloat16 --shape qwen2-0.5b --layers 24

All requests, twice as many as slots, are queued at the start. In flight, a prompt is prefilled between two decode
steps, whole or in pieces. transformers' continuous batching fills each batch, up to `max_batch_tokens`, with prompt
tokens beside a token of each running request; it has the full cache, and runs as many requests at a time as there are
slots."""

import argparse
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import kvcompress
from kvcompress.bench.shapes import SHAPES
from kvcompress.bench.standalone import CLOCKS, load
from kvcompress.bench.throughput import Asked, next_result, workload
from kvcompress.bench.timing import short, table
from kvcompress.flag_types import whole
from kvcompress.measure import TokenTimes

from .driver import Run, speed_parser, start

PAGE = 16  # tokens per page of continuous batching
Times = dict[int, list[float]]  # by request, when each token came, in seconds from the start


def in_flight(
    model: PreTrainedModel,
    requests: list[Asked],
    slots: int,
    now: Callable,
    method: str,
    entries: int,
    piece: int | None,
) -> Times:
    """Answer by `Session.generate_many`, with `prefill_tokens=piece`."""
    watches = [TokenTimes(now) for _ in requests]
    prompts = [
        kvcompress.Request(
            {"input_ids": torch.tensor([asked.prompt])}, {"max_new_tokens": asked.new, "stopping_criteria": [watch]}
        )
        for asked, watch in zip(requests, watches, strict=True)
    ]
    options = {} if method == "full" else {"budget": entries, "decode_budget": entries, "decode_interval": 32}
    with kvcompress.compress(model, method, **options) as session:
        start = now()
        for answer in session.generate_many(prompts, slots, prefill_tokens=piece, do_sample=False):
            if answer.error is not None:
                raise answer.error
    return {index: [time - start for time in watch.times] for index, watch in enumerate(watches)}


def continuous(model: PreTrainedModel, requests: list[Asked], slots: int, now: Callable, batch_tokens: int) -> Times:
    """Answer by transformers' continuous batching, with `max_batch_tokens=batch_tokens`."""
    longest = max(len(asked.prompt) + asked.new for asked in requests)
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=slots * (longest // PAGE + 1),
        max_batch_tokens=batch_tokens,
        max_requests_per_batch=slots,
        allow_block_sharing=False,
    )
    wanted = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    times, left = {}, len(requests)
    with model.continuous_batching_context_manager(
        generation_config=wanted, continuous_batching_config=config, block=False
    ) as manager:
        start = now()
        index = {
            manager.add_request(each.prompt, max_new_tokens=each.new, streaming=True): i
            for i, each in enumerate(requests)
        }
        while left:
            if (result := next_result(manager)) is None:
                continue
            of_request = times.setdefault(index[result.request_id], [])
            of_request += [now() - start] * (len(result.generated_tokens) - len(of_request))
            left -= result.is_finished()
    return times


def contenders(asked: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Times], dict]]:
    """Yield name, function and its further arguments."""
    for batch_tokens in asked.batch_tokens:
        yield f"continuous batching, {batch_tokens} tokens a batch", continuous, {"batch_tokens": batch_tokens}
    for method in asked.methods:
        for piece in (None, *asked.pieces):
            how = "prompts whole" if piece is None else f"`prefill_tokens={piece}`"
            yield f"`{method}`, {how}", in_flight, {"method": method, "entries": asked.entries, "piece": piece}


def record(name: str, slots: int, times: Times) -> dict:
    """Return a row of the table, in seconds."""
    firsts = sorted(of_request[0] for of_request in times.values())
    pauses = [max(later - earlier for earlier, later in pairwise(each)) for each in times.values()]
    last = max(of_request[-1] for of_request in times.values())
    return {
        "name": name,
        "slots": slots,
        "first": firsts[0],
        "median_first": median(firsts),
        "longest_pause": max(pauses),
        "median_longest_pause": median(pauses),
        "tokens_per_s": sum(map(len, times.values())) / last,
    }


def report(records: list[dict], asked: argparse.Namespace) -> str:
    header = ["slots", "", "first token of all, s", "median first token, s", "longest pause, s"]
    header += ["a request's longest pause, median, s", "tokens/s"]
    names = ("first", "median_first", "longest_pause", "median_longest_pause", "tokens_per_s")
    rows = [[each["slots"], each["name"], *(short(each[name]) for name in names)] for each in records]
    least, most = asked.answers
    return (
        f"Seconds ({asked.clock} clock, {asked.threads} threads) from the start of a queue of requests, two for each "
        f"slot: prompts of {asked.prompt} tokens, answers of {least} to {most}; {asked.layers} layers of "
        f"{asked.shape}'s shape, {asked.dtype}, random weights. A pause lies between two tokens of a request. Methods "
        f"other than full keep {asked.entries} entries.\n\n" + table(header, rows)
    )


def main(argv: list[str]) -> None:
    parser = speed_parser("latency", __doc__, methods=["full", "snapkv"])
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--layers", type=whole(1), default=4)
    parser.add_argument("--slots", type=whole(1), nargs="+", default=[16, 46])
    parser.add_argument("--prompt", type=whole(1), default=512, help="tokens of each (512)")
    parser.add_argument("--answers", type=whole(2), nargs=2, default=[32, 128], help="tokens, least and most")
    parser.add_argument("--pieces", type=whole(1), nargs="*", default=[128], help="prefill_tokens=")
    parser.add_argument("--batch-tokens", type=whole(1), nargs="*", default=[1024, 192], help="of continuous batching")
    parser.add_argument("--entries", type=whole(1), default=128, help="that methods other than full keep (128)")
    run = Run(parser, argv)
    asked = run.given
    config = {**SHAPES[asked.shape], "num_hidden_layers": asked.layers}
    model = load({"config": config}, asked.dtype, run.device)
    model.generation_config.eos_token_id = None  # every answer has the requested length
    for slots in asked.slots:
        requests = workload(model.config.vocab_size, 2 * slots, asked.prompt, *asked.answers, seed=slots)
        for name, serve, how in contenders(asked):

            def measured(slots: int, name: str, serve=serve, how=how, requests=requests) -> list[dict]:
                serve(model, requests[:2], slots, CLOCKS[asked.clock], **how)  # warm up
                return [record(name, slots, serve(model, requests, slots, CLOCKS[asked.clock], **how))]

            run.measure([{"slots": slots, "name": name}], measured)
    run.report("Latency of requests in flight", report(run.records, asked))


if __name__ == "__main__":
    start(main)
