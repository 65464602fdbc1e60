"""Reading the calibration files that authors published for their methods."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import KVCompressError, one_line, shown
from ..files import parse_json


def tensors_in(path: Path, *names: str) -> dict[str, torch.Tensor]:
    """Read the named tensors of a safetensors file. Raises KVCompressError."""
    try:
        with safe_open(path, framework="pt") as file:
            found = list(file.keys())
            if missing := [name for name in names if name not in found]:
                raise KVCompressError(
                    f"{shown(str(path))} has no tensor {missing[0]!r}; it has {', '.join(sorted(found)) or 'none'}"
                )
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, "safetensors file", error) from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise KVCompressError(
                f"{shown(str(path))}: tensor {name!r} is of {tensor.dtype}, not of floating-point numbers"
            )
    return tensors


def numbers_in(path: Path) -> torch.Tensor:
    """Read a table of tab-separated numbers as (rows, columns) in fp64. Raises KVCompressError."""
    try:
        rows = [[float(cell) for cell in line.split("\t")] for line in path.read_text(encoding="utf-8").splitlines()]
        return torch.tensor(rows, dtype=torch.float64)
    except (OSError, ValueError) as error:  # torch raises ValueError for rows of different lengths
        raise _unreadable(path, "table of numbers with tabs between them", error) from None


def json_in(path: Path) -> Any:
    """Read a JSON file. Raises KVCompressError."""
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(path, "JSON file", error) from None


def means_by_head(path: Path, heads: int, layers: int, ending: str = "") -> torch.Tensor:
    """Read the means over samples in a JSON file: (layers, heads) in fp64. Raises KVCompressError.

    The file has the samples' numbers under "layer-head" plus `ending`."""
    table = json_in(path)
    try:
        samples = [[table[f"{layer}-{head}{ending}"] for head in range(heads)] for layer in range(layers)]
        return torch.tensor([[sum(own) / len(own) for own in row] for row in samples], dtype=torch.float64)
    except (KeyError, TypeError, ZeroDivisionError, OverflowError) as error:
        raise KVCompressError(
            f"{shown(str(path))} does not have numbers for {layers} layers of {heads} heads: {error}"
        ) from None


def pickled_in(path: Path) -> Any:
    """Read tensors and plain values, and nothing else, from a file of `torch.save`. Raises KVCompressError."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling raises
        raise _unreadable(path, "file of torch.save", error) from None


def _unreadable(path: Path, kind: str, error: Exception) -> KVCompressError:
    reason = getattr(error, "strerror", None) or one_line(error, 200)
    return KVCompressError(f"{shown(str(path))} cannot be read as a {kind}: {reason}")
