"""`--use_cache DIR`: a batch that an earlier run answered in the same way is not answered again.

    DIR/<digest of the identity>/identity.json    what the answers depend on
    DIR/<digest of the identity>/<rank>.jsonl     a line per batch

A line is written as soon as a batch is answered, so a run that was interrupted goes on where it stopped. Whole batches
are kept, not single answers: in low precision an answer depends on its neighbours in the last bit.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts

from kvcompress.files import parse_json, write_text


class AnswerStore:
    """Answers under one identity.

    Attributes:
        reused: batches that were not answered again.
    """

    def __init__(self, root: Path, identity: dict[str, Any], rank: int = 0):
        """`identity`: all that an answer and its measurement depend on, apart from the prompts; plain JSON."""
        text = json.dumps(identity, sort_keys=True, indent=2)
        # Absolute: the working directory is another while lmms-eval runs.
        folder = root.absolute() / hashlib.sha256(text.encode()).hexdigest()[:32]
        write_text(folder / "identity.json", text + "\n")
        self._file = folder / f"{rank}.jsonl"
        self._known: dict[str, Any] = {}
        for file in sorted(folder.glob("*.jsonl")):
            for line in file.read_bytes().splitlines():
                self._read(line)
        self.reused = 0

    def _read(self, line: bytes) -> None:
        try:
            entry = parse_json(line)
            if entry["digest"] == _digest(entry["key"], entry["value"]):
                self._known[entry["key"]] = entry["value"]
        except (ValueError, TypeError, KeyError):  # a line that was cut: its batch is answered again
            return

    def knows(self, key: str) -> bool:
        return key in self._known

    def get(self, key: str) -> Any:
        return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        self._known[key] = value
        line = json.dumps({"key": key, "value": value, "digest": _digest(key, value)}).encode()
        with open(self._file, "ab", buffering=0) as file:  # one write: no other process's line gets between
            file.write(b"\n" * (file.tell() > 0) + line)  # before: the last line may have been cut


def _digest(key: str, value: Any) -> str:
    """By which a line that was damaged is known."""
    return hashlib.sha256(json.dumps([key, value]).encode()).hexdigest()[:16]


def key_of(requests: Sequence[Instance], what: bytes = b"") -> str:
    """Of a batch: its questions, how each is generated, and `what`, such as the digest of the prompts."""
    asked = [
        [request.args[2], *request.args[3:6], bool((request.metadata or {}).get("__padding_only__"))]
        for request in requests
    ]
    return hashlib.sha256(json.dumps([what.hex(), asked], sort_keys=True, default=str).encode()).hexdigest()


def to_json(results: list[GenerationResult], rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    counts = [[each.token_counts.input_tokens, each.token_counts.output_tokens] for each in results]
    return {"texts": [each.text for each in results], "tokens": counts, "rows": rows, "seconds": seconds}


def from_json(value: dict[str, Any]) -> tuple[list[GenerationResult], list[dict[str, Any]], float]:
    results = [
        GenerationResult(text=text, token_counts=TokenCounts(input_tokens=tokens_in, output_tokens=tokens_out))
        for text, (tokens_in, tokens_out) in zip(value["texts"], value["tokens"], strict=True)
    ]
    return results, value["rows"], value["seconds"]
