"""transformers' continuous batching with a full and with compressed caches: tokens per second at equal KV memory.

    python -m benchmarks.continuous_batching --threads 1              # CPU, fp32, SmolLM2-135M's shape
    python -m benchmarks.continuous_batching --requests 64 --prompt 512 --least 64 --most 1024 --kv-mb 370

Prompts of random tokens, answers of random lengths; every contender gets the same of both, and the same pages.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import torch

from kvcompress.bench.continuous_batching import serve
from kvcompress.bench.models import SHAPES
from kvcompress.bench.standalone import load
from kvcompress.bench.timing import environment, table, write

METHODS = ["full", "streamingllm", "keydiff", "snapkv:window_size=8", "tova"]


def contender(text: str, budget: int, interval: int) -> dict:
    """Arguments of `serve` for `NAME` or `NAME:OPTION=VALUE`; tova evicts at every step, the others at each
    `interval`."""
    name, *given = text.split(":")
    if name == "full":
        return {}
    options = {} if name == "tova" else {"decode_interval": interval}
    options |= dict(option.split("=") for option in given)
    return {"method": name, "budget": budget, "decode_budget": budget, **options}


def report(records: list[dict], arguments: argparse.Namespace) -> str:
    rows = [
        [
            record["method"],
            f"{record['tokens'] / record['seconds']:.1f}",
            f"{record['tokens'] / record['cpu_seconds']:.1f}",
            record["steps"],
            f"{record['tokens'] / record['steps']:.1f}",
            f"{1e3 * record['cpu_seconds'] / record['steps']:.0f}",
        ]
        for record in records
    ]
    header = ["method", "tokens per s", "tokens per CPU s", "steps", "tokens per step", "CPU ms per step"]
    return (
        "# Continuous batching on compressed pages\n\n"
        f"{arguments.requests} requests of {arguments.prompt} prompt tokens and {arguments.least} to {arguments.most} "
        f"new ones, all there at the start, greedily answered by transformers' continuous batching (sdpa) with "
        f"{arguments.kv_mb} MB of pages of {arguments.page_size} entries: {arguments.shape}'s shape, random weights, "
        f"{arguments.dtype}, {environment(arguments.device)['device']}. `full` is transformers' own cache; the others "
        f"keep {arguments.budget} entries of a prompt and while decoding (`decode_budget`), cut back each "
        f"{arguments.interval} tokens (tova each token). One run of each.\n\n" + table(header, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--least", type=int, default=16, help="new tokens of a request, at least")
    parser.add_argument("--most", type=int, default=256, help="new tokens of a request, at most")
    parser.add_argument("--kv-mb", type=int, default=60)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/continuous_batching"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load({"config": SHAPES[arguments.shape]}, arguments.dtype, arguments.device)
    generator = torch.Generator().manual_seed(0)
    size = (arguments.requests, arguments.prompt)
    prompts = torch.randint(model.config.vocab_size, size, generator=generator).tolist()
    new = torch.randint(arguments.least, arguments.most + 1, size[:1], generator=generator).tolist()
    records = []
    for text in arguments.methods:
        given = contender(text, arguments.budget, arguments.interval)
        served = serve(model, prompts, new, arguments.kv_mb * 10**6, arguments.page_size, **given)
        records.append({"method": text, **asdict(served), "tokens": sum(new)})
        print(records[-1], flush=True)
    write(arguments.out, report(records, arguments), records, arguments.device)


if __name__ == "__main__":
    main()
