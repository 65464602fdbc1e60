"""Results on disk: one folder per cell, written whole or not at all.

A cell is one (task, model, method, ratio) under one set of settings:

    results/<task>/<model>/<method>-<ratio>[-key=value...]/
        results.json    scores, efficiency summary, protocol, fingerprint
        samples.jsonl   one line per question: lmms-eval's sample with our measurement

A setting that differs from its default stands in the folder name, so different settings never share a folder.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS_FILE = "results.json"
SAMPLES_FILE = "samples.jsonl"

MAX_NAME_LENGTH = 200  # most file systems allow 255 bytes


@dataclass(frozen=True)
class Cell:
    """One point of a sweep.

    Attributes:
        ratio: fraction of the prompt's KV entries kept, in (0, 1]; None where a budget is given.
        budget: KV entries kept per layer and head; None where a ratio is given.
        options: the method's options that differ from their defaults.
        settings: settings of the run (limit, dtype, ...) that differ from their defaults.
    """

    task: str
    model: str
    method: str
    ratio: float | None = None
    budget: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> str:
        """What is kept, as in the folder's name: `0.2`, or `budget=64`."""
        return f"budget={self.budget}" if self.ratio is None else f"{self.ratio:g}"

    def folder(self, root: Path) -> Path:
        name = "-".join([self.method, self.size, *_key_values({**self.options, **self.settings})])
        return root / _safe(self.task) / model_folder(self.model) / _shorten(name)


def settings_name(settings: dict[str, Any]) -> str:
    """`limit=250-seed=1`: the settings of a run as a part of a file name; empty for the defaults."""
    return _shorten("-".join(_key_values(settings)))


def model_folder(model: str) -> str:
    """Folder name of a model: `tiny`, `org__name`; for an absolute path `parent__name@<hash of the path>`."""
    if not os.path.isabs(model):
        return _safe(model)
    # Two checkpoints may share their last two folders; the hash keeps them apart.
    return _safe("/".join(Path(model).parts[-2:])) + "@" + hashlib.sha256(model.encode()).hexdigest()[:6]


def _key_values(mapping: dict[str, Any]) -> list[str]:
    return [_safe(f"{key}={_plain(value)}") for key, value in sorted(mapping.items())]


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ",".join(f"{key}={_plain(item)}" for key, item in sorted(value.items()))
    return str(value)


def _safe(name: str) -> str:
    return re.sub(r"[^\w.,=+@-]", "_", name.replace("/", "__"))


def _shorten(name: str) -> str:
    if len(name) <= MAX_NAME_LENGTH:
        return name
    return name[: MAX_NAME_LENGTH - 9] + "-" + hashlib.sha256(name.encode()).hexdigest()[:8]


def incomplete_reason(folder: Path, fingerprint: dict[str, Any]) -> str | None:
    """Why a cell has to be computed, or None where its complete results for this fingerprint are on disk."""
    if not folder.exists():
        return "no results yet"
    try:
        results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        with open(folder / SAMPLES_FILE, encoding="utf-8") as file:
            samples = sum(1 for line in file if json.loads(line))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except json.JSONDecodeError:
        return "its files are cut or damaged"
    if samples != results.get("n_samples"):
        return f"{samples} samples on disk where {results.get('n_samples')} were evaluated"
    stored, wanted = results.get("fingerprint", {}), json.loads(dumps(fingerprint))
    changed = sorted(key for key in {*stored, *wanted} if stored.get(key) != wanted.get(key))
    return f"changed since: {', '.join(changed)}" if changed else None


@contextmanager
def new_cell(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to write a cell in; at the end it takes the cell's place in one rename.

    An exception inside removes the temporary folder and leaves an older cell as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as unfinished:
        draft, old = Path(unfinished, "new"), Path(unfinished, "old")
        draft.mkdir()
        yield draft
        if folder.exists():
            os.replace(folder, old)
        os.replace(draft, folder)


def write_cell(folder: Path, results: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """Write a cell's two files into `folder`; `results.json` last, for it says that the cell is complete."""
    lines = "".join(dumps(sample) + "\n" for sample in samples)
    write_text(folder / SAMPLES_FILE, lines)
    write_text(folder / RESULTS_FILE, dumps({**results, "n_samples": len(samples)}, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def load_cells(folder: Path) -> list[dict[str, Any]]:
    """The results.json of every finished cell under `folder` (results/<task>/<model>), sorted by name."""
    files = sorted(folder.glob(f"[!.]*/{RESULTS_FILE}"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, default=_jsonable, ensure_ascii=False)


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and torch
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)  # functions and classes in lmms-eval's task configs
