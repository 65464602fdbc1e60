"""What a method kept, written down: `fixtures/<name>.npz`."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

FIXTURES = Path(__file__).with_name("fixtures")


@dataclass(frozen=True)
class Recording:
    """What the authors' code kept of some states.

    Attributes:
        label: names the case in tests and tables: the method, and how it was set.
        method, options: what of ours is held against it; the options are those that make the two say the same.
        states: a name of `states.NAMES`; `prompt`: how many of its tokens are the prompt; `decoded`: how many decode
            steps followed it.
        budget: entries asked for per layer and KV head.
        kept: bool (layers, kv_heads, prompt + decoded).
        ratio: the one of the table that it stands for, where the authors' code holds whole heads, chunks or frames, so
            that `budget` is what is nearest; None where `budget` says it.
        known: what a calibrated method knows of the states' model, as in its file; else empty.
        keys, values: of merged entries (layers, kv_heads, kept, head_dim) where all heads keep as many; else None.
    """

    label: str
    method: str
    options: dict[str, object]
    states: str
    prompt: int
    budget: int
    kept: torch.Tensor = field(repr=False)
    decoded: int = 0
    _: KW_ONLY
    ratio: float | None = None
    keys: torch.Tensor | None = field(default=None, repr=False)
    values: torch.Tensor | None = field(default=None, repr=False)
    known: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return f"{self.label}/{self.states}/{self.prompt}+{self.decoded}/{self.budget}"


def kept_columns(kept: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """bool (heads, tokens): which of the keys `among` (heads, tokens, head_dim) are in `kept` (heads, entries,
    head_dim), bit by bit. For code that gives back states and no indices."""
    return torch.stack([(a[:, None] == k[None]).all(-1).any(-1) for k, a in zip(kept, among, strict=True)])


def source(repository: str, checkout: Path, functions: str, version: str | None = None) -> dict[str, str]:
    """The repository's commit (or the tag of a `version` that is no checkout), the functions that ran and the command
    that was given."""
    if version is None:
        head = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        version = head.stdout.strip()
    return {
        "repository": f"https://github.com/{repository}",
        "commit": version,
        "functions": functions,
        "command": f"python -m {sys.modules['__main__'].__spec__.name} CHECKOUT",
        "torch": torch.__version__,
    }


def save(name: str, recordings: Sequence[Recording], of: dict[str, str]) -> None:
    """Write a fixture, with its `source`."""
    arrays, rows = {}, []
    for number, recording in enumerate(recordings):
        row = asdict(recording)
        for part in ("keys", "values"):
            if (states := row.pop(part)) is not None:
                arrays[f"{number}/{part}"] = states.numpy()
        known = row.pop("known")  # of a method and states; it is the same in all their recordings that have it
        row["is_known"] = bool(known)
        arrays |= {f"{recording.method}/{recording.states}/{name}": part.numpy() for name, part in known.items()}
        arrays[f"{number}/kept"] = np.packbits(row.pop("kept").numpy(), axis=-1)
        rows.append(row)
    write(FIXTURES / f"{name}.npz", arrays, {**of, "recordings": rows})


def write(path: Path, arrays: dict[str, np.ndarray], about: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays, about=json.dumps(about))
    print(f"{path.name}: {len(about['recordings'])} recordings, {path.stat().st_size / 1e3:.0f} kB")


def about(name: str) -> dict[str, str]:
    """Where a fixture comes from."""
    with np.load(FIXTURES / f"{name}.npz") as file:
        return {key: value for key, value in json.loads(str(file["about"])).items() if key != "recordings"}


def load(name: str) -> list[Recording]:
    with np.load(FIXTURES / f"{name}.npz") as file:
        recordings = []
        for number, row in enumerate(json.loads(str(file["about"]))["recordings"]):
            length = row["prompt"] + row["decoded"]
            kept = np.unpackbits(file[f"{number}/kept"], axis=-1, count=length).astype(bool)
            merged = {
                part: torch.from_numpy(file[f"{number}/{part}"])
                for part in ("keys", "values")
                if f"{number}/{part}" in file.files
            }
            of_states = f"{row['method']}/{row['states']}/"
            is_known = row.pop("is_known", True)
            of_method = [key for key in file.files if is_known and key.startswith(of_states)]
            known = {key.removeprefix(of_states): file[key] for key in of_method}
            merged["known"] = {name: torch.from_numpy(part) for name, part in known.items()}
            recordings.append(Recording(**row, kept=torch.from_numpy(kept), **merged))
    return recordings


def fixtures() -> list[str]:
    return sorted(path.stem for path in FIXTURES.glob("*.npz"))
