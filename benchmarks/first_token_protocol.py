"""Measure when compression takes effect: accuracy on the bundled task under three protocols.

    python -m benchmarks.first_token_protocol --limit 200 --out benchmarks/results/first_token_protocol.md

- `first token full`: the prefill gives the first answer token, as usual; the budget never affects it.
- `refed, seen`: the prompt's last token is fed again on the compressed cache (`first_token="compressed"`). Its query
  was available when the cache was compressed.
- `refed, unseen`: the same, but the cache was compressed from the prompt without its last token, as in a harness that
  prefills all but that one: the method did not score with the query that reads the cache.
"""

import argparse
import datetime
import platform
from pathlib import Path

import torch
import transformers
from rich.progress import track

import kvcompress
from lmms_eval_plugins.cells.results import write_text
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT
from lmms_eval_plugins.tiny_vlm.accuracy import Reader, by_kind
from lmms_eval_plugins.tiny_vlm.dataset import HEADLINE, read_examples

METHODS = {"snapkv": {"window_size": 8}, "streamingllm": {}, "random": {}}
RATIOS = (0.5, 0.25, 0.1, 0.05)
PROTOCOLS = {
    "first token full": {},
    "refed, seen": {"first_token": "compressed"},
    "refed, unseen": {"first_token": "compressed", "scope": "context", "context_tokens": -1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=200, help="questions")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/first_token_protocol.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    reader = Reader(TINY_CHECKPOINT)
    examples = read_examples(HEADLINE)[: arguments.limit]

    def accuracy(method: str | None, ratio: float | None, **options: object) -> float:
        with kvcompress.compress(reader.model, method, ratio, max_new_tokens=8, **options):
            return by_kind(examples, reader.answers(examples))["all"]

    rows = [
        [method, protocol, *(accuracy(method, ratio, **options, **extra) for ratio in RATIOS)]
        for method, options in track(METHODS.items(), description="methods")
        for protocol, extra in PROTOCOLS.items()
    ]
    header = ["method", "protocol", *(f"{ratio:g}" for ratio in RATIOS)]
    lines = [header, ["---"] * 2 + ["---:"] * len(RATIOS), *rows]
    text = (
        "# When compression takes hold\n\n"
        f"Exact match (%) of the bundled model on {len(examples)} questions of `tiny_textvqa`, by the ratio kept; full "
        f"cache: {accuracy(None, None)}. Made by `python -m benchmarks.first_token_protocol --limit {arguments.limit}` "
        f"on {datetime.date.today()}, {platform.machine()} CPU, torch {torch.__version__}, "
        f"transformers {transformers.__version__}.\n\n"
        + "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(arguments.out, text)
    print(text)


if __name__ == "__main__":
    main()
