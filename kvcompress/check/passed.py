"""The record of method files whose present content has passed `kvcompress check`."""

import hashlib
import json
import os
from pathlib import Path

from ..files import write_text


def record() -> Path:
    """Return the record's file, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcompress" / "checked.json"


def note(file: Path) -> None:
    """Record that this file has passed."""
    record().parent.mkdir(parents=True, exist_ok=True)
    write_text(record(), json.dumps({**_noted(), str(file): _hash(file)}, indent=2) + "\n")


def has_passed(file: Path) -> bool:
    """Return whether this file has passed and not changed since."""
    return _noted().get(str(file)) == _hash(file)


def _noted() -> dict[str, str]:
    try:
        noted = json.loads(record().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing or damaged: nothing has passed
        return {}
    return noted if isinstance(noted, dict) else {}


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
