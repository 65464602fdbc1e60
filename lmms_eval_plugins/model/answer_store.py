"""`--use_cache DIR`: reuse the answers that an earlier run gave with the same settings.

    DIR/<digest of the identity>/identity.json    what the answers depend on
    DIR/<digest of the identity>/<rank>.jsonl     a line per batch

Each batch is written as soon as it is answered, so an interrupted run resumes where it stopped. Whole batches are
stored, not single answers: in low precision, the last bits of an answer's logits depend on the batch's other rows.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts

from kvcompress.files import parse_json, write_text


class AnswerStore:
    """The stored answers of all runs with one identity."""

    def __init__(self, root: Path, identity: dict[str, Any], rank: int = 0):
        """`identity`: everything but the prompts that an answer and its measurements depend on, as plain JSON."""
        text = json.dumps(identity, sort_keys=True, indent=2)
        # Absolute, because the working directory changes while lmms-eval runs.
        folder = root.absolute() / hashlib.sha256(text.encode()).hexdigest()[:32]
        write_text(folder / "identity.json", text + "\n")
        self._file = folder / f"{rank}.jsonl"
        self._known: dict[str, Any] = {}
        for file in sorted(folder.glob("*.jsonl")):
            for line in file.read_bytes().splitlines():
                self._read(line)

    def _read(self, line: bytes) -> None:
        try:
            entry = parse_json(line)
            if entry["digest"] == _digest(entry["key"], entry["value"]):
                self._known[entry["key"]] = entry["value"]
        except (ValueError, TypeError, KeyError):  # a truncated line: its batch is answered again
            return

    def get(self, key: str) -> Any:
        """Return what is stored for a key; None if nothing is."""
        return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        self._known[key] = value
        line = json.dumps({"key": key, "value": value, "digest": _digest(key, value)}).encode()
        with open(self._file, "ab", buffering=0) as file:  # a single write, so lines of several processes never mix
            try:
                file.write(b"\n" * (file.tell() > 0) + line)  # newline first: the last line may be truncated
            except OSError as error:
                error.filename = str(self._file)  # that of a full disk names no file
                raise


def _digest(key: str, value: Any) -> str:
    """Return a checksum that reveals a damaged line."""
    return hashlib.sha256(json.dumps([key, value]).encode()).hexdigest()[:16]


def key_of(requests: Sequence[Instance], what: bytes) -> str:
    """Return a batch's key: a hash of its questions, their generation arguments, and `what` (the prompts' digest)."""
    asked = [
        [request.args[2], *request.args[3:6], bool((request.metadata or {}).get("__padding_only__"))]
        for request in requests
    ]
    return hashlib.sha256(json.dumps([what.hex(), asked], sort_keys=True, default=str).encode()).hexdigest()


def to_json(results: list[GenerationResult], rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return what is stored of a batch: its answers, their rows, and the seconds that they took."""
    return {"results": [asdict(each) for each in results], "rows": rows, "seconds": seconds}


def from_json(value: dict[str, Any]) -> tuple[list[GenerationResult], list[dict[str, Any]], float]:
    """Invert `to_json`."""
    results = [GenerationResult(each["text"], TokenCounts(**each["token_counts"])) for each in value["results"]]
    return results, value["rows"], value["seconds"]
