"""NVIDIA/kvpress, which has the authors' modules of KVzap (kvzap_press.py) and Fast KVzip (fastkvzip_press.py): what
they predict from drawn hidden states with drawn weights, in fixtures/learned/."""

import sys
from pathlib import Path

import numpy as np
import torch

from . import presses
from .recording import FIXTURES

FOLDER = FIXTURES / "learned"
TOKENS, HIDDEN, HEADS, GROUPS, INNER, SIZE, SINKS = 24, 12, 2, 3, 6, 4, 5
KVZAP = {"linear": None, "mlp": INNER}


def normal(draw: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(draw.standard_normal(shape, dtype=np.float32))


def main() -> None:
    theirs = presses.load(Path(sys.argv[1]), "kvzap", "fastkvzip")
    draw = np.random.Generator(np.random.PCG64(0))
    hidden = normal(draw, 1, TOKENS, HIDDEN)
    modules = {
        f"kvzap-{kind}": theirs["KVzapModel"](
            theirs["KVzapConfig"](input_dim=HIDDEN, output_dim=HEADS, n_modules=1, hidden_dim=inner)
        ).layers[0]
        for kind, inner in KVZAP.items()
    }
    modules["fastkvzip"] = theirs["FastKVzipGate"](0, HIDDEN, HEADS, GROUPS, torch.float32, SIZE, SINKS)
    FOLDER.mkdir(exist_ok=True)
    for name, module in modules.items():
        weights = {key: normal(draw, *tensor.shape) for key, tensor in module.state_dict().items()}
        module.load_state_dict(weights)
        with torch.no_grad():
            scores = module(hidden) if name == "fastkvzip" else module(hidden).transpose(1, 2)
        arrays = {f"weights/{key}": tensor.numpy() for key, tensor in weights.items()}
        np.savez_compressed(FOLDER / f"{name}.npz", hidden=hidden.numpy(), scores=scores.numpy(), **arrays)
        print(f"{name}: {(FOLDER / f'{name}.npz').stat().st_size} bytes")


if __name__ == "__main__":
    main()
