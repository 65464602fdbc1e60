"""Which files with methods have passed `kvcompress check`, as they stand."""

import hashlib
import json
import os
from pathlib import Path

from ..files import write_text


def record() -> Path:
    """Where it is noted, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvcompress" / "checked.json"


def note(file: Path) -> None:
    """This file has passed."""
    record().parent.mkdir(parents=True, exist_ok=True)
    write_text(record(), json.dumps({**_noted(), str(file): _hash(file)}, indent=2) + "\n")


def has_passed(file: Path) -> bool:
    """Whether this file has passed and not changed since."""
    return _noted().get(str(file)) == _hash(file)


def _noted() -> dict[str, str]:
    try:
        noted = json.loads(record().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it is damaged: nothing has passed
        return {}
    return noted if isinstance(noted, dict) else {}


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
