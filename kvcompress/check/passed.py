"""The record of method files whose present content has passed `kvcompress check`."""

import hashlib
import json
import os
from pathlib import Path

from ..files import locked, write_text


def record() -> Path:
    """Return the record's file, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcompress" / "checked.json"


def note(file: Path, content: str) -> None:
    """Record that this file has passed with a content of this hash, whatever it holds by now."""
    record().parent.mkdir(parents=True, exist_ok=True)
    with locked(record().parent):  # another check may end at the same time
        write_text(record(), json.dumps({**_noted(), str(file): content}, indent=2) + "\n")


def has_passed(file: Path) -> bool:
    """Return whether this file has passed and not changed since."""
    return _noted().get(str(file)) == hash_of(file)


def _noted() -> dict[str, str]:
    try:
        noted = json.loads(record().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing or damaged: nothing has passed
        return {}
    return noted if isinstance(noted, dict) else {}


def hash_of(file: Path) -> str:
    """Return the hash of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
