"""Measure when compression takes effect: accuracy on the bundled task under three protocols.

    python -m benchmarks.first_token_protocol --limit 200 --out benchmarks/results/first_token_protocol.md

- `first token full`: the prefill gives the first answer token, as usual; the budget never affects it.
- `refed, seen`: the prompt's last token is fed again on the compressed cache (`first_token="compressed"`). Its query
  was available when the cache was compressed.
- `refed, unseen`: the same, but the cache was compressed from the prompt without its last token, as in a harness that
  prefills all but that one: the method did not score with the query that reads the cache.
"""

import torch
from rich.progress import track

import kvcompress
from kvcompress.bench.timing import table
from kvcompress.flag_types import whole
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT
from lmms_eval_plugins.tiny_vlm.accuracy import Reader, by_kind
from lmms_eval_plugins.tiny_vlm.dataset import HEADLINE, read_examples

from .driver import FOLDER, new_parser, page_of_answers, publish, start

METHODS = {"snapkv": {"window_size": 8}, "streamingllm": {}, "random": {}}
RATIOS = (0.5, 0.25, 0.1, 0.05)
PROTOCOLS = {
    "first token full": {},
    "refed, seen": {"first_token": "compressed"},
    "refed, unseen": {"first_token": "compressed", "scope": "context", "context_tokens": -1},
}


def main(argv: list[str]) -> None:
    parser = new_parser("first_token_protocol", __doc__, out=FOLDER / "first_token_protocol.md")
    parser.add_argument("--limit", type=whole(1), default=200, help="questions (200)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    reader = Reader(TINY_CHECKPOINT)
    examples = read_examples(HEADLINE)[: given.limit]

    def accuracy(method: str | None, ratio: float | None, **options: object) -> float:
        with kvcompress.compress(reader.model, method, ratio, max_new_tokens=8, **options):
            return by_kind(examples, reader.answers(examples))["all"]

    rows = [
        [method, protocol, *(accuracy(method, ratio, **options, **extra) for ratio in RATIOS)]
        for method, options in track(METHODS.items(), description="methods")
        for protocol, extra in PROTOCOLS.items()
    ]
    what = (
        f"Exact match (%) of the bundled model on {len(examples)} questions of `tiny_textvqa`, by the ratio kept; full "
        f"cache: {accuracy(None, None)}."
    )
    shown = table(["method", "protocol", *(f"{ratio:g}" for ratio in RATIOS)], rows, names=2)
    page = page_of_answers(["first_token_protocol", *argv], "When compression takes hold", what, shown)
    publish(given.out.with_suffix(".md"), page)


if __name__ == "__main__":
    start(main)
