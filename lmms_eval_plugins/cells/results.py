"""Results on disk: one folder per cell, written atomically.

A cell is one (task, model, method, ratio) under one set of settings:

    results/<task>/<model>/<method>-<ratio>[-key=value...]/
        results.json    scores, efficiency summary, protocol, fingerprint
        samples.jsonl   one line per question: lmms-eval's sample with our measurement

The folder name contains every setting that differs from its default, so different settings never share a folder.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from kvcompress.errors import one_line
from kvcompress.files import locked, unfinished, write_text

from .errors import DamagedFile, leave_out

RESULTS_FILE = "results.json"
SAMPLES_FILE = "samples.jsonl"

MAX_NAME_BYTES = 200  # most file systems allow 255
MAX_VALUE_LENGTH = 100
SHOWN = 40  # characters shown of a value that is longer or has unsafe characters


@dataclass(frozen=True)
class Cell:
    """One point of a sweep.

    Attributes:
        ratio: fraction of the prompt's KV entries kept, in (0, 1]; None if a budget is given.
        budget: KV entries kept per layer and head; None if a ratio is given.
        options: the method's options that differ from their defaults; and `server`, what kind of server answered, if
            one did.
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
        """The ratio or budget as in the folder's name: `0.2` or `budget=64`."""
        return f"budget={self.budget}" if self.ratio is None else exact(self.ratio)

    def folder(self, root: Path) -> Path:
        name = "-".join([self.method, self.size, *_key_values(*self.options.items(), *self.settings.items())])
        return root / _shorten(_safe(self.task)) / model_folder(self.model) / _shorten(name)


def settings_name(settings: dict[str, Any]) -> str:
    """Return a run's settings as part of a file name, such as `limit=250-seed=1`; empty for the defaults."""
    return _shorten("-".join(_key_values(*settings.items())))


def model_folder(model: str) -> str:
    """Return a model's folder name: `tiny`, `org__name`; for an absolute path `parent__name@<hash of the path>`."""
    if not os.path.isabs(model):
        return _shorten(_safe(model))
    # Two checkpoints may share their last two folders; the hash keeps them apart.
    name = re.sub(r"[^\w.,=+@-]", "_", "/".join(Path(model).parts[-2:]).replace("/", "__"))
    return _shorten(name) + "@" + hashlib.sha256(model.encode()).hexdigest()[:6]


def exact(number: float) -> str:
    """Format a number with up to six digits, or with as many as it takes to read it back exactly."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(float(number))


def _key_values(*pairs: tuple[str, Any]) -> list[str]:
    return [f"{_safe(key)}={_value(value)}" for key, value in sorted(pairs, key=itemgetter(0))]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{_safe(str(key))}={_value(item)}" for key, item in sorted(value.items()))
    return _safe(exact(value) if isinstance(value, float) else str(value))


def _safe(text: str) -> str:
    """Return `text` as part of a file name; different texts give different names. Text that could not be read back from
    its name, or is long, ends with a digest."""
    name = re.sub(r"[^\w.,+@-]", "_", text.replace("/", "__"))
    is_readable = name.replace("__", "/") == text and text not in (".", "..")
    if is_readable and len(text) <= MAX_VALUE_LENGTH and not re.search("@[0-9a-f]{8}$", text):
        return name
    return f"{name[:SHOWN]}@{_digest(text)}"


def _shorten(name: str) -> str:
    if len(name.encode()) <= MAX_NAME_BYTES:
        return name
    return f"{name.encode()[: MAX_NAME_BYTES - 9].decode(errors='ignore')}-{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def read_results(folder: Path) -> dict[str, Any]:
    """Read a cell's results.json. Raises DamagedFile, or FileNotFoundError if there is none."""
    try:
        results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither UTF-8 nor JSON
        raise DamagedFile(f"{RESULTS_FILE} is damaged: {one_line(error)}") from None
    from .contents import Results, fault  # takes a tenth of a second, which a wrong command line should not wait for

    if wrong := fault(results, Results):
        raise DamagedFile(f"{RESULTS_FILE} is damaged: {wrong}")
    return results


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a cell's samples.jsonl. Raises DamagedFile, or FileNotFoundError if there is none."""
    try:
        with open(folder / SAMPLES_FILE, encoding="utf-8") as file:
            samples = [json.loads(line) for line in file]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFile(f"{SAMPLES_FILE} is damaged: {one_line(error)}") from None
    from .contents import Sample, fault

    for number, sample in enumerate(samples, 1):
        if wrong := fault(sample, Sample):
            raise DamagedFile(f"{SAMPLES_FILE}, line {number}, is damaged: {wrong}")
    return samples


def read_cell(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read both files of a cell. Raises DamagedFile, or FileNotFoundError if one is missing."""
    results, samples = read_results(folder), read_samples(folder)
    if len(samples) != results["n_samples"]:
        raise DamagedFile(f"{len(samples)} samples on disk, but {results['n_samples']} were evaluated")
    return results, samples


def incomplete_reason(folder: Path, fingerprint: dict[str, Any], unknown: tuple[str, ...] = ()) -> str | None:
    """Say why a cell must be computed; None if its complete results for this fingerprint are on disk. `unknown`: keys
    of the fingerprint whose values are unknown, and so not compared."""
    if not folder.exists():
        return "no results yet"
    try:
        results, _ = read_cell(folder)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except DamagedFile as error:
        return str(error)
    if not isinstance(results.get("fingerprint"), dict):
        return f"{RESULTS_FILE} is damaged: no fingerprint"
    return changed_since(results["fingerprint"], fingerprint, unknown)


def changed_since(stored: dict[str, Any], fingerprint: dict[str, Any], unknown: tuple[str, ...]) -> str | None:
    """Say where a cell's `stored` fingerprint differs from `fingerprint`; None if nowhere. `unknown`: as in
    `incomplete_reason`."""
    wanted = json.loads(dumps(fingerprint))
    compared = {*stored, *wanted}.difference(unknown)
    changed = sorted(key for key in compared if stored.get(key) != wanted.get(key))
    return f"changed since: {', '.join(changed)}" if changed else None


@contextmanager
def new_cell(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write a cell in; at the end, one rename puts it in the cell's place.

    On an exception, the temporary folder is removed and an older cell stays as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(folder.parent) as own:
        draft, old = own / "new", own / "old"
        draft.mkdir()
        yield draft
        with locked(folder.parent):  # another run may be writing the same cell
            if folder.exists():
                os.replace(folder, old)
            os.replace(draft, folder)


def write_cell(folder: Path, results: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """Write a cell's two files into `folder`; `results.json` comes last, because it marks the cell as complete."""
    lines = "".join(dumps(sample) + "\n" for sample in samples)
    write_text(folder / SAMPLES_FILE, lines)
    write_text(folder / RESULTS_FILE, dumps({**results, "n_samples": len(samples)}, indent=2) + "\n")


def number_of(value: Any, score_key: str) -> float:
    """Return a question's score by one metric, NaN if it is not a number; `score_key`: its key if a scorer returns a
    dictionary."""
    if isinstance(value, dict):
        value = value.get(score_key)
    return float(value) if isinstance(value, int | float) else math.nan


def score_key(cell: dict[str, Any], task: str) -> str:
    """Return a task's `score_key` from the `configs` of a cell's results."""
    return cell.get("configs", {}).get(task, {}).get("score_key") or "score"


def tokens_out(cell: dict[str, Any], sample: dict[str, Any]) -> float:
    """Return the tokens of a question's answer, or of all its rounds together; of repeated answers (`--repeats`, or
    the task's own `repeats:`) the mean, since the score is that of one."""
    tokens = sum(row["tokens_out"] for row in sample.get("measurements", [sample["measurement"]]))
    repeats = cell.get("configs", {}).get(sample["task"], {}).get("repeats") or 1
    return tokens if repeats == 1 else tokens / repeats


def load_cells(folder: Path) -> list[dict[str, Any]]:
    """Read the results.json of every finished cell in `folder` (results/<task>/<model>), sorted by name. A damaged one
    is left out, with a line that names it."""
    cells = []
    for file in sorted(folder.glob(f"[!.]*/{RESULTS_FILE}")):
        try:
            cells.append(read_results(file.parent))
        except DamagedFile as error:
            leave_out(file.parent, error)
    return cells


def result_folders(root: Path) -> list[Path]:
    """Return all folders under `root` with a results.json, sorted. Symbolic links are followed, but a folder counts
    once."""
    found, seen = [], set()
    for folder, below, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        below[:] = [] if real in seen else sorted(below)
        if real not in seen and RESULTS_FILE in files:
            found.append(Path(folder))
        seen.add(real)
    return sorted(found)


def dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, default=_jsonable, ensure_ascii=False)


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and torch
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)  # functions and classes in lmms-eval's task configs
